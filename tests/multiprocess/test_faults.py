"""Sharded training in which one rank goes wrong: all ranks end in time, say why, and the next run starts clean."""

import re

import pytest
from build_tree import BUILD, built
from rank_processes import end, free_port, rank_processes

PROGRAM = BUILD / "tests" / "multiprocess" / "neap_faults"
TIMEOUT_MS = 60_000

KILLED = -9
# Which rank, which collective, which unit; or before any, where another rank may leave while this one still connects.
COLLECTIVE = r"(all_gather|reduce_scatter|all_reduce|barrier) of '[\w. ]+' in group 'world'"
PLACE = rf"\[comm\] rank {{rank}}, ({COLLECTIVE}|connecting 3 ranks for group 'world') "
BROKEN_HOOK = "rank 1 left: a hook at layers.1 is out of luck"

# How rank 1 goes wrong, its exit code and what it says itself, and what the others say.
FAULTS = {
    "kill_forward": (KILLED, None, "lost rank 1, which died or left"),
    "kill_backward": (KILLED, None, "lost rank 1, which died or left"),
    "throw_forward": (1, "a hook at layers.1 is out of luck", BROKEN_HOOK),
    "throw_backward": (1, "a hook at layers.1 is out of luck", BROKEN_HOOK),
    "early": (1, "rank 1 never came to its first collective", "rank 1 left: rank 1 never came to its first collective"),
    "other_order": (1, "does something else: it called", "does something else: it called"),
    "skipped_unit": (1, "does something else: it called", "does something else: it called"),
    "extra_unit": (1, "does something else: it called", "does something else: it called"),
    "skipped_backward": (1, "does something else: it called", "does something else: it called"),
    "out_of_memory": (1, "out of memory", "rank 1 left: "),
}


@pytest.fixture(autouse=True)
def program_is_built():
    built(PROGRAM)


def run(fault, device, port):
    """(exit code, standard output, standard error) of three ranks."""
    with rank_processes([[PROGRAM, fault, device, str(TIMEOUT_MS)]] * 3, MASTER_PORT=port) as world:
        return [end(process) for process in world]


@pytest.fixture(scope="module")
def clean():
    """What the ranks print when nothing goes wrong, by device."""
    return {device: run("none", device, free_port()) for device in ("cpu", "sim")}


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_without_a_fault_the_devices_train_alike(clean, device):
    assert [(code, err) for code, _, err in clean[device]] == [(0, "")] * 3
    assert [out for _, out, _ in clean[device]] == [out for _, out, _ in clean["cpu"]]


@pytest.mark.parametrize(
    ("fault", "device"),
    [(fault, d) for fault in FAULTS for d in ("cpu", "sim") if (fault, d) != ("out_of_memory", "cpu")],
)
def test_a_fault_of_one_rank_ends_all_and_the_next_run_starts_clean(clean, fault, device):
    code_of_1, own, told = FAULTS[fault]
    port = free_port()
    results = run(fault, device, port)
    assert results[1][0] == code_of_1, results[1]
    if own is not None:
        assert own in results[1][2]
    for rank in (0, 2):
        code, out, err = results[rank]
        assert (code, out) == (1, ""), err
        assert re.search(PLACE.format(rank=rank), err), err
        assert told in err
        assert "waited" not in err, "noticed by itself, not when the time was over"
    assert run("none", device, port) == clean[device]
