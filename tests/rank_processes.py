"""Ranks as processes of this machine, for tests: their environment, their start and their end."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

GIVE_UP = 120  # seconds until a test calls a rank hung


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra):
    """This process's, without what launchers set."""
    launchers = ("RANK", "WORLD", "LOCAL_", "MASTER_", "OMPI_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**kept, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in extra.items()}}


@contextmanager
def rank_processes(commands, cwd=None, stdin=None, **extra):
    """The processes of one world, a command for each rank; those still there at the end are killed.

    `extra`: variables of all of them, say MASTER_PORT, which is a free one otherwise.
    """
    place = {"WORLD_SIZE": len(commands), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | extra
    processes = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(RANK=rank, **place),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def under_torchrun(size, command, cwd, *options):
    """One world under torchrun, whose options come first; as subprocess.run() returns it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--no-python"]
    return subprocess.run(
        [sys.executable, *launcher, *options, *command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GIVE_UP,
        check=False,
    )


def end(process):
    """(exit code, standard output, standard error) of a rank."""
    out, err = process.communicate(timeout=GIVE_UP)
    return process.returncode, out, err
