#!/usr/bin/env python3
"""Gets a machine ready to build: Debian packages, a Python environment in .venv, and torch. `make setup` calls it.

Runs on nothing but the standard library, changes nothing when all is in place, and then takes well under a second.

torch is taken from, in this order: the interpreter named by NEAP_PYTHON, an environment in .venv that has it, python3
on PATH. Where none has torch 2.11 or newer, torch 2.13.0 is installed into .venv. A torch found elsewhere is used where
it lies (a .pth file in .venv names its folder), so a CUDA build or a build of one's own is neither copied nor replaced.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".neap-setup"
MINIMUM_TORCH = (2, 11)
TORCH_TO_INSTALL = "torch==2.13.0"
LINT_STAMP = VENV / ".neap-setup-lint"
REQUIREMENTS = [ROOT / "tools" / "requirements.txt", ROOT / "tools" / "requirements-nodeps.txt"]
DOCS_REQUIREMENTS = ROOT / "tools" / "requirements-docs.txt"

# Asks an interpreter where its torch lies. Importing torch would take seconds; a library is enough to know it is whole.
FIND_TORCH = """
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("torch")
for folder in (spec.submodule_search_locations or []) if spec else []:
    folder = pathlib.Path(folder)
    version = folder / "version.py"
    if version.exists() and (folder / "lib" / "libtorch_cpu.so").exists() and (folder / "include").exists():
        line = next(l for l in version.read_text().splitlines() if l.startswith("__version__"))
        print(folder.parent, line.split("=")[1].strip().strip("'\\""))
"""


class SetupError(Exception):
    """Something the person in front of the machine has to do; the text says what."""


def say(text):
    print(f"setup: {text}", flush=True)


def run(command):
    if subprocess.run([str(part) for part in command], check=False).returncode != 0:
        raise SetupError(f"this command failed: {' '.join(str(part) for part in command)}")


def wanted_packages(groups):
    lines = (ROOT / "tools" / "debian-packages.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return [package for group, package in rows if group in groups]


def missing_packages(packages):
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\\n", *packages]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")}
    return [package for package in packages if package not in installed]


def ensure_packages(groups):
    if shutil.which("dpkg-query") is None:
        say("not a Debian system; CMake will name the libraries it does not find")
        return
    missing = missing_packages(wanted_packages(groups))
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise SetupError(f"Debian packages are missing; run this and try again:\n\n    sudo {' '.join(install)}\n")
    say(f"installing Debian packages: {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "--quiet"], [*install, "--quiet"]):
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            raise SetupError(f"this command failed: {' '.join(command)}")


def torch_of(python):
    """(folder that holds torch/, version) of an interpreter's torch, or None."""
    asked = subprocess.run([str(python), "-c", FIND_TORCH], capture_output=True, text=True, check=False)
    parts = asked.stdout.split()
    return (parts[0], parts[1]) if asked.returncode == 0 and len(parts) == 2 else None


def new_enough(version):
    numbers = version.split("+")[0].split(".")[:2]
    return all(n.isdigit() for n in numbers) and tuple(int(n) for n in numbers) >= MINIMUM_TORCH


def choose_torch():
    """(interpreter, folder that holds torch/) to use; folder None: install torch into .venv."""
    named = os.environ.get("NEAP_PYTHON")
    if named:
        found = torch_of(named) if shutil.which(named) else None
        if found is None or not new_enough(found[1]):
            have = f"has torch {found[1]}" if found else "has no torch"
            raise SetupError(f"NEAP_PYTHON={named} {have}; set it to one with torch 2.11 or newer, or unset it")
        return Path(named), found[0]
    for python in (PYTHON, shutil.which("python3"), sys.executable):
        found = torch_of(python) if python and Path(python).exists() else None
        if found and new_enough(found[1]):
            return Path(python), found[0]
    return Path(shutil.which("python3") or sys.executable), None


def is_own(python):
    return python.absolute() == PYTHON


def version_of(python):
    ask = [str(python), "-c", "import sys; print(sys.version_info[:2])"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout


def make_environment(python):
    if PYTHON.exists():
        if version_of(PYTHON) == version_of(python):
            return
        say(f".venv has another Python than {python}; making it anew")
    say(f"making .venv from {python}")
    # --clear: a half-made environment of an interrupted run is no foundation.
    run([python, "-m", "venv", "--clear", VENV])


def pip(*arguments):
    run([PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments])


def site_packages():
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def ensure_python():
    python, folder = choose_torch()
    elsewhere = folder is not None and not Path(folder).is_relative_to(VENV)
    key = "\n".join([f"torch {folder if elsewhere else 'in .venv'}", *(path.read_text() for path in REQUIREMENTS)])
    stamp = hashlib.sha256(key.encode()).hexdigest()
    if folder is not None and PYTHON.exists() and STAMP.exists() and STAMP.read_text() == stamp:
        return
    if not is_own(python):
        make_environment(python)
    STAMP.unlink(missing_ok=True)
    link = site_packages() / "_neap_torch.pth"
    link.unlink(missing_ok=True)
    if elsewhere:
        link.write_text(f"{folder}\n")
    elif torch_of(PYTHON) is None:
        say(f"installing {TORCH_TO_INSTALL} (this may take minutes)")
        pip(TORCH_TO_INSTALL)
    say("installing what the tools and tests need")
    pip("--requirement", REQUIREMENTS[0])
    pip("--no-deps", "--requirement", REQUIREMENTS[1])
    found = torch_of(PYTHON)
    if found is None:
        raise SetupError(f"torch is still not found by {PYTHON}; remove .venv and try again")
    say(f"torch {found[1]} in {found[0]}")
    STAMP.write_text(stamp)


def ensure_documentation():
    """What builds the site. Made anew with the environment, whose stamp is part of its own."""
    key = "\n".join(path.read_text() for path in (STAMP, DOCS_REQUIREMENTS))
    stamp = hashlib.sha256(key.encode()).hexdigest()
    if LINT_STAMP.exists() and LINT_STAMP.read_text() == stamp:
        return
    say("installing what builds the documentation")
    pip("--requirement", DOCS_REQUIREMENTS)
    LINT_STAMP.write_text(stamp)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lint", action="store_true", help="also what `make lint` needs")
    options = parser.parse_args()
    try:
        ensure_packages({"build", "lint"} if options.lint else {"build"})
        ensure_python()
        if options.lint:
            ensure_documentation()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
