#!/usr/bin/env python3
"""Every check of the text of this repository: `make lint`.

Files are the tracked ones. clang's thread-safety analysis and clang-tidy run over the torch-free sources, where the
locks and the state machines are: with torch's headers clang-tidy takes most of a minute for a file. What clang-tidy has
found good is remembered in the build directory and not looked at again until its preprocessed text changes.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def is_torch_free(name):
    """A source that says so itself, or whose header of the same name does."""
    header = (ROOT / name).with_suffix(".h")
    return any(path.exists() and path.read_text().startswith("// torch-free") for path in (ROOT / name, header))


def run(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def quiet(output):
    """clang-tidy counts what it suppressed in system headers; nobody wants to know."""
    noise = ("warnings generated", "Suppressed ", "Use -header-filter", "warnings treated as errors")
    return "\n".join(line for line in output.splitlines() if not any(word in line for word in noise))


class Tidy:
    """clang-tidy of one file, skipped when the same text was good before."""

    def __init__(self, build, flags):
        self.build = build
        self.flags = flags
        self.memory = build / "clang-tidy-good"
        self.memory.mkdir(exist_ok=True)
        self.config = (ROOT / ".clang-tidy").read_bytes()

    def __call__(self, name):
        preprocess = ["clang++", "-std=c++20", "-E", "-P", *self.flags[name], name]
        text = subprocess.run(preprocess, cwd=ROOT, capture_output=True, check=False).stdout
        good = self.memory / hashlib.sha256(self.config + name.encode() + text).hexdigest()
        if good.exists():
            return 0, ""
        # CMake's own command lines are g++'s; clang-tidy may not know all of its warnings.
        command = ["clang-tidy", "--quiet", "--extra-arg=-Wno-unknown-warning-option", "-p", str(self.build), name]
        status, output = run(command)
        if status == 0:
            good.touch()
        return status, output


class Lint:
    def __init__(self, jobs):
        self.jobs = jobs
        self.failed = []

    def check(self, title, work, action=run):
        """Runs pieces of work side by side; the check fails when one of them does."""
        began = time.monotonic()
        with ThreadPoolExecutor(self.jobs) as pool:
            results = list(pool.map(action, work))
        for status, output in results:
            if status != 0:
                print(quiet(output))
        bad = sum(status != 0 for status, _ in results)
        seconds = time.monotonic() - began
        print(f"lint: {title}: {'ok' if bad == 0 else f'{bad} of {len(work)} failed'} ({seconds:.0f} s)", flush=True)
        if bad:
            self.failed.append(title)


def compiled_sources(build):
    """Sources that this build compiles, with their include and definition flags."""
    flags = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        name = os.path.relpath(entry["file"], ROOT)
        # `-isystem DIR` is two words, the others one.
        kept = [w for w in words if w.startswith(("-I", "-D"))]
        kept += [w for i, word in enumerate(words) if word == "-isystem" for w in (word, words[i + 1])]
        flags[name] = kept
    return flags


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="build directory with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    cpp = tracked("*.h", "*.cpp")
    compiled = compiled_sources(options.build)
    torch_free = [n for n in cpp if n in compiled and is_torch_free(n) and not n.endswith("_test.cpp")]
    lint = Lint(options.jobs)
    lint.check("clang-format", [["clang-format", "--dry-run", "-Werror", *cpp]])
    lint.check("ruff", [[sys.executable, "-m", "ruff", "check", "."]])
    lint.check("ruff format", [[sys.executable, "-m", "ruff", "format", "--check", "."]])
    lint.check("layers", [[sys.executable, "tools/check_layers.py"]])
    site = ["--site-dir", str((options.build / "site").resolve())]
    lint.check("documentation", [[sys.executable, "-m", "mkdocs", "build", "--strict", *site]])
    analysis = ["clang++", "-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror"]
    lint.check("thread safety", [[*analysis, *compiled[name], name] for name in torch_free])
    lint.check("clang-tidy", torch_free, Tidy(options.build, compiled))
    if lint.failed:
        print(f"lint: failed: {', '.join(lint.failed)}")
        return 1
    print(f"lint: {len(cpp)} C++ files, {len(torch_free)} of them analysed; all well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
