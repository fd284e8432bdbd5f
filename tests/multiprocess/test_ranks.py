"""Ranks as processes over Gloo: every collective, launchers, and what happens when a rank dies, lags or errs.

A rank that is killed or stopped must end the others with an error that names it, and in time.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from build_tree import BUILD, built
from rank_processes import GIVE_UP, end, environment, free_port, rank_processes

PROGRAM = BUILD / "tests" / "multiprocess" / "neap_ranks"


@pytest.fixture(autouse=True)
def program_is_built():
    built(PROGRAM)


def ranks(size, scenario, timeout_ms=60_000, **extra):
    return rank_processes([[PROGRAM, scenario, str(timeout_ms)]] * size, stdin=subprocess.PIPE, **extra)


def wait_for(process, line):
    for found in process.stdout:
        if line in found:
            return
    raise AssertionError(f"ended without '{line}': {process.stderr.read()}")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_over_gloo(size):
    with ranks(size, "contract") as world:
        for rank, process in enumerate(world):
            code, out, err = end(process)
            assert code == 0, err
            assert out == f"rank {rank} of {size}, attempt 0: ok\n"


def test_every_collective_between_simulated_devices():
    with ranks(2, "sim") as world:
        for process in world:
            code, _, err = end(process)
            assert code == 0, err


def test_a_process_may_have_one_world_after_another():
    with ranks(2, "twice") as world:
        assert [end(process)[0] for process in world] == [0, 0]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_others_at_once(victim):
    with ranks(3, "loop") as world:
        for process in world:
            wait_for(process, "looping")
        killed = time.monotonic()
        world[victim].kill()
        for rank, process in enumerate(world):
            if rank == victim:
                continue
            code, _, err = end(process)
            assert code == 1
            assert f"[comm] rank {rank}, all_reduce of 'layers.3' in group 'world' (ranks 0, 1, 2)" in err
            # With rank 0 goes the store, so that a rank may learn of it by another one's leaving.
            texts = [
                f"lost rank {victim}, which died or left",
                f"rank {victim}, which serves the store, does not answer",
            ]
            assert any(text in err for text in texts), err
        assert time.monotonic() - killed < 30, "the timeout is 60 s: they noticed by themselves"


def test_a_killed_rank_ends_groups_that_it_is_not_in():
    """Ranks 0 and 3 have no group in common but the world, which is idle."""
    with ranks(4, "rows") as world:
        for process in world:
            wait_for(process, "looping")
        killed = time.monotonic()
        world[3].kill()
        for rank, process in enumerate(world[:3]):
            code, _, err = end(process)
            assert code == 1
            assert f"[comm] rank {rank}, " in err
            assert "of 'layers.3' in group '" in err
            assert "lost rank 3, which died or left" in err
        assert time.monotonic() - killed < 30


@pytest.mark.parametrize("victim", [0, 2])  # rank 0 serves the store as well
def test_a_stopped_rank_ends_the_others_after_the_timeout(victim):
    with ranks(3, "loop", timeout_ms=2_000) as world:
        for process in world:
            wait_for(process, "looping")
        os.kill(world[victim].pid, signal.SIGSTOP)
        ends = [end(process) for rank, process in enumerate(world) if rank != victim]
    for code, _, err in ends:
        assert code == 1
        assert "all_reduce of 'layers.3' in group 'world'" in err
        assert "waited 2 s for rank" in err
    # One rank waits for another that waits for the stopped one. Nobody can ask it, but the second says so.
    texts = [f"waited 2 s for rank {victim}", f"waiting for rank {victim},"]
    assert any(text in err for text in texts for _, _, err in ends), ends


def test_a_rank_that_never_calls_ends_the_others_after_the_timeout():
    with ranks(3, "absent", timeout_ms=1_000) as world:
        for rank in (0, 2):
            code, _, err = end(world[rank])
            assert code == 1
            assert "waited 1 s for rank 1, which has not called it" in err
        code, _, err = end(world[1])  # its standard input ends, so it calls at last
        assert code == 1
        assert "all_reduce of 'layers.3'" in err


def test_mismatched_collectives_end_every_rank():
    with ranks(3, "mismatch") as world:
        errors = [end(process)[2] for process in world]
    for rank, error in enumerate(errors):
        assert f"[comm] rank {rank}, " in error
        assert "all_gather of 'layers.4', 24 elements of Float" in error
        assert "all_reduce (sum) of 'layers.3', 1000 elements of Float" in error


def test_an_exception_between_collectives_reaches_every_rank():
    with ranks(3, "throw") as world:
        errors = [end(process)[2] for process in world]
    assert errors[1] == "out of memory in layers.2\n"
    for rank in (0, 2):
        assert "all_reduce of 'layers.3' in group 'world'" in errors[rank]
        assert "rank 1 left: out of memory in layers.2" in errors[rank]


def test_a_world_that_does_not_meet_says_so():
    environment_of_rank_1 = environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    alone = subprocess.run(
        [PROGRAM, "leave", "1000"],
        env=environment_of_rank_1,
        capture_output=True,
        text=True,
        timeout=GIVE_UP,
        check=False,
    )
    assert alone.returncode == 1
    assert "[comm] rank 1 expected the store of rank 0 at 127.0.0.1:" in alone.stderr
    assert "check MASTER_ADDR and MASTER_PORT" in alone.stderr


def test_a_taken_port_says_so():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        result = subprocess.run(
            [PROGRAM, "leave", "1000"],
            env=environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=taken.getsockname()[1]),
            capture_output=True,
            text=True,
            timeout=GIVE_UP,
            check=False,
        )
    assert result.returncode == 1
    assert "choose a free MASTER_PORT" in result.stderr


def test_bad_variables_are_named():
    result = subprocess.run(
        [PROGRAM, "leave"],
        env=environment(RANK=2, WORLD_SIZE=2),
        capture_output=True,
        text=True,
        timeout=GIVE_UP,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == "[launch] expected RANK to be a whole number from 0 to 1; found '2'\n"


def torchrun(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--no-python", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GIVE_UP,
        check=False,
    )


def test_torchrun():
    result = torchrun("--standalone", "--nproc-per-node", 2, PROGRAM, "twice")
    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if line) == [
        "rank 0 of 2, attempt 0: ok",
        "rank 1 of 2, attempt 0: ok",
    ]


def test_torchrun_starts_again_after_a_failure(tmp_path):
    """The launcher's store outlives the ranks: what the first attempt left in it must not reach the second."""
    script = tmp_path / "fails_first.sh"
    script.write_text(
        f'#!/bin/sh\nif [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exec {PROGRAM} throw; fi\nexec {PROGRAM} leave\n'
    )
    script.chmod(0o755)
    result = torchrun("--standalone", "--max-restarts", 1, "--nproc-per-node", 2, script)
    assert result.returncode == 0, result.stderr
    assert "rank 1 of 2, attempt 1: ok" in result.stdout


def test_mpirun_variables():
    port = free_port()
    world = [
        subprocess.Popen(
            [PROGRAM, "leave"],
            env=environment(
                OMPI_COMM_WORLD_RANK=rank,
                OMPI_COMM_WORLD_SIZE=2,
                OMPI_COMM_WORLD_LOCAL_RANK=rank,
                OMPI_COMM_WORLD_LOCAL_SIZE=2,
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [end(process)[0] for process in world] == [0, 0]
