"""nt.fully_shard() on Python modules: ranks are processes over Gloo, each running scenarios of shard_ranks.py."""

import sys
from pathlib import Path

import pytest
from rank_processes import end, rank_processes, under_torchrun

RANK = str(Path(__file__).with_name("shard_ranks.py"))


def run(*scenarios, device="cpu", world=2):
    command = [sys.executable, RANK, device, *scenarios]
    with rank_processes([command] * world, LOCAL_WORLD_SIZE=world) as ranks:
        results = [end(process) for process in ranks]
    for code, out, err in results:
        assert code == 0 and out.endswith("ok\n"), err
    return [out for _, out, _ in results]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_bits_are_those_of_one_process_that_adds_gradients_in_rank_order(device):
    run("equality", device=device)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_nor_do_offload_checkpoints_accumulation_and_tied_weights_change_them(device):
    run("combinations", device=device)


def test_three_ranks_have_them_too_and_other_meshes():
    run("equality", world=3)
    run("copies")


@pytest.mark.parametrize(("device", "world"), [("cpu", 1), ("cpu", 2), ("sim", 2), ("cpu", 3)])
def test_parameters_stay_the_same_objects_and_hold_their_share(device, world):
    run("identity", "lifetime", device=device, world=world)


def test_states_are_those_of_plain_torch():
    run("state_dicts", "wrong_states", "buffers", "meta")
    run("state_dicts", device="sim", world=1)


def test_checkpoints_go_on_with_the_same_bits():
    run("checkpoints")


def test_clipping_and_low_precision_and_what_users_do_by_the_way():
    run("clipping", "low_precision", "misuse")


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
    with rank_processes([[sys.executable, RANK, "cpu", "leaving"]] * 2, LOCAL_WORLD_SIZE=2) as ranks:
        (first, _, told), (second, _, own) = [end(process) for process in ranks]
    assert first != 0 and second != 0
    assert "ValueError: a bad sample" in own
    assert "rank 1 left: ValueError: a bad sample" in told


def test_under_torchrun(tmp_path):
    result = under_torchrun(2, [sys.executable, RANK, "cpu", "clipping"], tmp_path)
    assert result.returncode == 0, result.stderr
