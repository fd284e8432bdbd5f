"""Ranks over Gloo that run scenarios of shard_ranks.py."""

from pathlib import Path

from forking_ranks import world_of_forks

RANK = str(Path(__file__).with_name("shard_ranks.py"))


def run(*scenarios, device="cpu", world=2):
    results = world_of_forks("shard_ranks", device, *scenarios, world=world)
    for code, out, err in results:
        assert code == 0 and out.endswith("ok\n"), err
    return [out for _, out, _ in results]
