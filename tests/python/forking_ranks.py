"""The process that ranks are forks of: it has imported what they import, which takes longer than most of what they do.

forking_ranks.py MODULE...: for each line of standard input, {"module", "arguments", "folder", "ranks": [variables]}, a
world whose ranks are as if they had been started as `MODULE ARGUMENTS`. They write to FOLDER/RANK.out and RANK.err, and
their exit codes are a line of standard output. world_of_forks() is the other side.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rank_processes import GIVE_UP, environment, free_port

MODULES = ["shard_ranks", "accelerate_rank", "distributed_rank", "transformers.models.llama.modeling_llama", "peft"]


def become_a_rank(folder, rank, variables):
    os.environ.update(variables)
    ends = [os.open(os.devnull, os.O_RDONLY)]
    ends += [os.open(folder / f"{rank}.{end}", os.O_WRONLY | os.O_CREAT) for end in ("out", "err")]
    for target, end in enumerate(ends):
        os.dup2(end, target)


def serve():
    """Returns in each rank: (module, arguments)."""
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank, variables in enumerate(request["ranks"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                become_a_rank(Path(request["folder"]), rank, variables)
                return request["module"], request["arguments"]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    sys.exit()


def main():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread that forks would not have"
    gc.freeze()  # what is imported is garbage in no rank
    module, arguments = serve()
    sys.argv = [module, *arguments]
    sys.modules[module].main()


_server = []


def _started():
    if not _server:
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ["PYTHONPATH"]])
        server = subprocess.Popen(
            [sys.executable, __file__, *MODULES],
            env=environment(PYTHONPATH=path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _server.append(server)
        atexit.register(_end)
    return _server[0]


def _end():
    """With whatever ranks there are."""
    while _server:
        server = _server.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def world_of_forks(module, *arguments, world=2):
    """[(exit code, standard output, standard error)] of ranks that run `main()` of one of MODULES."""
    place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{key: str(value) for key, value in (place | {"RANK": rank}).items()} for rank in range(world)]
    server = _started()
    with tempfile.TemporaryDirectory() as name:
        request = {"module": module, "arguments": arguments, "folder": name, "ranks": ranks}
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline() if select.select([server.stdout], [], [], GIVE_UP)[0] else ""
        if not answer:
            _end()
        files = [[Path(name, f"{rank}.{end}") for end in ("out", "err")] for rank in range(world)]
        texts = [[file.read_text() if file.exists() else "" for file in of_rank] for of_rank in files]
    assert answer, f"the ranks did not end within {GIVE_UP} s, or their server did: {texts}"
    return [(code, out, err) for code, (out, err) in zip(json.loads(answer), texts, strict=True)]


if __name__ == "__main__":
    main()
