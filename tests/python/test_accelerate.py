"""Offload in models that accelerate prepares, on two ranks."""

import json

import pytest
from forking_ranks import world_of_forks


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_two_ranks_train_to_the_same_bits_with_less_memory(device):
    """Each rank itself compares losses, norms and gradients of two steps with those without offload."""
    expected = {f"{kind} after" for kind in ("ddp", "fsdp2", "fsdp2 checkpoint")}
    if device == "sim":
        expected |= {"ddp before", "fsdp2 before"}
    for code, out, err in world_of_forks("accelerate_rank", device):
        assert code == 0, err
        seen = json.loads(out.splitlines()[-1])
        assert seen["hazards"] == []
        assert seen["cases"].keys() == expected
        for name, case in seen["cases"].items():
            assert case["moved"] > 0, name
            assert device == "cpu" or case["peak"] < case["plain"] * (1 if "checkpoint" in name else 0.7), name
