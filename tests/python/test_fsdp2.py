"""Offload under torch's own fully_shard and DistributedDataParallel, on two ranks."""

import json

import pytest
from forking_ranks import world_of_forks


@pytest.mark.parametrize(("device", "kinds"), [("cpu", ["fsdp2"]), ("sim", ["fsdp2", "ddp"])])
def test_two_ranks_train_to_the_same_bits_with_less_memory(device, kinds):
    """Each rank itself compares losses and gradients of three steps with those without offload."""
    for code, out, err in world_of_forks("distributed_rank", device, *kinds):
        assert code == 0, err
        seen = json.loads(out.splitlines()[-1])
        assert seen["hazards"] == []
        for kind in kinds:
            cases = seen["kinds"][kind]
            assert cases.keys() == {"after", "before", "accumulate after", "checkpoint after"}
            for name, case in cases.items():
                assert case["moved"] > 0, (kind, name)
                if device == "cpu":
                    continue
                if kind == "ddp" and "checkpoint" in name:
                    assert case["peak"] <= case["plain"]  # the peak is at the end of backward: all gradients, whole
                else:
                    assert case["peak"] < case["plain"] * (1 if "checkpoint" in name else 0.5), (kind, name)
