"""Puts this folder on the path: rank_processes.py serves tests in several of the folders below. And the build tree's
Python package, for these processes and those that they start."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(os.environ.get("NEAP_BUILD_DIR", ROOT / "build" / "dev")).resolve() / "python"

sys.path.insert(0, str(PACKAGE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
