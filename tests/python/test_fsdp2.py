"""Offload under torch's own fully_shard and DistributedDataParallel, on two ranks."""

import json
import sys
from pathlib import Path

import pytest
from rank_processes import end, rank_processes

RANK = Path(__file__).with_name("distributed_rank.py")


@pytest.mark.parametrize(("kind", "device"), [("fsdp2", "cpu"), ("fsdp2", "sim"), ("ddp", "sim")])
def test_two_ranks_train_to_the_same_bits_with_less_memory(kind, device):
    """Each rank itself compares losses and gradients of three steps with those without offload."""
    with rank_processes([[sys.executable, RANK, kind, device]] * 2) as ranks:
        ended = [end(rank) for rank in ranks]
    for code, out, err in ended:
        assert code == 0, err
        seen = json.loads(out.splitlines()[-1])
        assert seen["cases"].keys() == {"after", "before", "accumulate after", "checkpoint after"}
        assert seen["hazards"] == []
        for name, case in seen["cases"].items():
            assert case["moved"] > 0, name
            if device == "cpu":
                continue
            if kind == "ddp" and "checkpoint" in name:
                assert case["peak"] <= case["plain"]  # the peak is at the end of backward: all gradients, whole
            else:
                assert case["peak"] < case["plain"] * (1 if "checkpoint" in name else 0.5), name
