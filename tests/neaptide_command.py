"""The `neaptide` command under test: that of the installed package, or that of this tree where none is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("neaptide") is None:
    sys.path.insert(0, str(ROOT / "python"))
PACKAGE = Path(importlib.util.find_spec("neaptide").origin).parent


def command(*arguments):
    return [sys.executable, "-m", "neaptide", *map(str, arguments)]


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}


def neaptide(*arguments, cwd=None):
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), check=False, capture_output=True, text=True, timeout=300
    )
