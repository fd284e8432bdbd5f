"""Puts this folder on the path: build_tree.py and rank_processes.py serve tests in several of the folders below. And
the build tree's Python package, for these processes and those that they start."""

import os
import sys
from pathlib import Path

from build_tree import BUILD

PACKAGE = BUILD / "python"
# Tests run side by side a file at a time. These take longest and come first: begun last, one would run alone.
LONGEST = [
    "cli/test_parallel.py",
    "cli/test_checkpoint.py",
    "multiprocess/test_ranks.py",
    "multiprocess/test_faults.py",
    "examples/test_examples.py",
    "cli/test_hyperparallel_664.py",
    "cli/test_bad_input.py",
    "python/test_fully_shard_bits.py",
    "python/test_fsdp2.py",
    "python/test_fully_shard.py",
    "python/test_wheel.py",
    "python/test_reported_bugs.py",
]

sys.path.insert(0, str(PACKAGE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(items):
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
