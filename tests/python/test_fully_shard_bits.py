"""nt.fully_shard() has the bits of one process that adds gradients in rank order."""

import pytest
from shard_processes import run


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_on_two_ranks_also_with_offload_checkpoints_accumulation_and_tied_weights(device):
    run("equality", "combinations", device=device)


def test_on_three_ranks_whose_parameters_stay_the_same_objects():
    run("equality", "identity", "lifetime", world=3)
