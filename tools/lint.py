#!/usr/bin/env python3
"""Every check of the text of this repository: `make lint`.

Files are the tracked ones. clang-tidy, with clang's thread-safety analysis, runs over the torch-free sources, where the
locks and the state machines are: with torch's headers it takes most of a minute for a file. It reads the groups that
the build compiles together, since most of its time goes into the standard library's headers; clang's path-sensitive
analyzer, which looks into main files alone, reads single sources. What was found good is remembered in the build
directory and not looked at again until its preprocessed text changes.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# NewDeleteLeaks takes the heap copy inside std::function for a leak (clang 14).
ANALYZER = "-*,clang-analyzer-core.*,clang-analyzer-cplusplus.*,-clang-analyzer-cplusplus.NewDeleteLeaks"
# A quarter of the default: the longest functions take four times less and are still walked through.
ANALYZER_EFFORT = ["-Xclang", "-analyzer-config", "-Xclang", "max-nodes=50000"]


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
    """clang-tidy of one piece, skipped when the same text was good before."""

    def __init__(self, build, checks, *compiler):
        self.memory = build / "clang-tidy-good"
        self.memory.mkdir(exist_ok=True)
        self.checks = checks
        self.compiler = ["-std=c++20", "-Wno-unknown-warning-option", *compiler]
        self.version = (ROOT / ".clang-tidy").read_bytes() + repr((checks, compiler)).encode()

    def __call__(self, piece):
        name, flags = piece
        preprocess = ["clang++", "-std=c++20", "-E", "-P", *flags, name]
        text = subprocess.run(preprocess, cwd=ROOT, capture_output=True, check=False).stdout
        good = self.memory / hashlib.sha256(self.version + name.encode() + text).hexdigest()
        if good.exists():
            return 0, ""
        command = ["clang-tidy", "--quiet", f"--checks={self.checks}", name, "--", *self.compiler, *flags]
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


def kept_flags(command):
    """Include and definition flags: CMake's own command lines are g++'s."""
    words = shlex.split(command)
    kept = [w for w in words if w.startswith(("-I", "-D"))]
    # `-isystem DIR` is two words, the others one.
    return kept + [w for i, word in enumerate(words) if word == "-isystem" for w in (word, words[i + 1])]


def members(entry):
    """The sources of one compile command: those that CMake has put together into one, or the one it names."""
    path = Path(entry["file"])
    if "Unity" not in path.parts:
        return [os.path.relpath(path, ROOT)]
    return [os.path.relpath(name, ROOT) for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)]


def torch_free_pieces(build):
    """What to analyse, as (file, flags): the torch-free groups of sources, and every torch-free source by itself."""
    groups, singles = [], {}
    entries = [(members(entry), entry) for entry in json.loads((build / "compile_commands.json").read_text())]
    for sources, entry in sorted(entries, key=lambda pair: -len(pair[0])):
        flags = kept_flags(entry["command"])
        chosen = [n for n in sources if is_torch_free(n) and not n.endswith("_test.cpp") and n not in singles]
        singles |= dict.fromkeys(chosen, flags)
        if chosen == sources:
            groups.append((os.path.relpath(entry["file"], ROOT), flags))
        else:
            groups += [(name, flags) for name in chosen]
    return groups, list(singles.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="build directory with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    cpp = tracked("*.h", "*.cpp")
    groups, singles = torch_free_pieces(options.build)
    lint = Lint(options.jobs)
    lint.check("clang-format", [["clang-format", "--dry-run", "-Werror", *cpp]])
    lint.check("ruff", [[sys.executable, "-m", "ruff", "check", "."]])
    lint.check("ruff format", [[sys.executable, "-m", "ruff", "format", "--check", "."]])
    lint.check("layers", [[sys.executable, "tools/check_layers.py"]])
    site = ["--site-dir", str((options.build / "site").resolve())]
    lint.check("documentation", [[sys.executable, "-m", "mkdocs", "build", "--strict", *site]])
    lint.check("clang-tidy", groups, Tidy(options.build, "clang-diagnostic-thread-safety*", "-Wthread-safety"))
    lint.check("clang's analyzer", singles, Tidy(options.build, ANALYZER, *ANALYZER_EFFORT))
    if lint.failed:
        print(f"lint: failed: {', '.join(lint.failed)}")
        return 1
    print(f"lint: {len(cpp)} C++ files, {len(singles)} of them analysed; all well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
