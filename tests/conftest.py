"""Puts this folder on the path: build_tree.py and rank_processes.py serve tests in several of the folders below. And
the build tree's Python package, for these processes and those that they start."""

import os
import sys

from build_tree import BUILD

PACKAGE = BUILD / "python"

sys.path.insert(0, str(PACKAGE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
