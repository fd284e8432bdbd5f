"""nt.fully_shard() on Python modules: ranks are processes over Gloo, each running scenarios of shard_ranks.py."""

import sys

import pytest
from forking_ranks import world_of_forks
from rank_processes import end, rank_processes, under_torchrun
from shard_processes import RANK, run


@pytest.mark.parametrize(("device", "world"), [("cpu", 2), ("sim", 2), ("sim", 1)])
def test_parameters_stay_the_same_objects_and_hold_their_share(device, world):
    """https://github.com/mindspore-ai/hyper-parallel/issues/306: one rank alone kept tensors that are no leaves."""
    run("identity", "lifetime", device=device, world=world)


def test_states_are_those_of_plain_torch_on_other_meshes_too():
    run("state_dicts", "wrong_states", "buffers", "meta", "copies")
    run("state_dicts", device="sim", world=1)


def test_checkpoints_clipping_low_precision_and_what_users_do_by_the_way():
    run("checkpoints", "clipping", "low_precision", "passes_inside_a_pass", "misuse")


def test_mistakes_are_value_errors_on_every_rank():
    run("mistakes")


def test_without_torch_distributed():
    with rank_processes([[sys.executable, RANK, "cpu", "uninitialised"]]) as (process,):
        code, _, err = end(process)
    assert code == 0, err


def test_bytes_at_rest_are_no_more_than_torchs():
    print(run("against_fsdp2")[0])


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_was_said():
    run("missing")


def test_a_rank_that_fails_ends_the_others_with_its_reason():
    (first, _, told), (second, _, own) = world_of_forks("shard_ranks", "cpu", "leaving")
    assert first != 0 and second != 0
    assert "ValueError: a bad sample" in own
    assert "rank 1 left: ValueError: a bad sample" in told


def test_under_torchrun(tmp_path):
    result = under_torchrun(2, [sys.executable, RANK, "cpu", "lifetime"], tmp_path)
    assert result.returncode == 0, result.stderr
