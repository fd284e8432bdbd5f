"""Ranks over Gloo that run scenarios of shard_ranks.py."""

import sys
from pathlib import Path

from rank_processes import end, rank_processes

RANK = str(Path(__file__).with_name("shard_ranks.py"))


def run(*scenarios, device="cpu", world=2):
    command = [sys.executable, RANK, device, *scenarios]
    with rank_processes([command] * world, LOCAL_WORLD_SIZE=world) as ranks:
        results = [end(process) for process in ranks]
    for code, out, err in results:
        assert code == 0 and out.endswith("ok\n"), err
    return [out for _, out, _ in results]
