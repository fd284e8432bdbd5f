#!/usr/bin/env python3
"""A training step in pieces over ranks: ours against torch's fully_shard (FSDP2), on the same cores in one run.

The same job twice: a Llama of 34 million parameters from the same files, the same tokens, AdamW with the same settings,
a unit for each layer, Gloo, one thread a rank. The losses of the first steps have to agree, or there is no figure. The
two take turns, one step each, the first of a pair in turn the second of the next one, so that a machine that slows
down or speeds up does so for both; the ratio is that of the medians. A step lasts until all ranks have ended it.

Bytes are those of live CPU tensors of rank 0, counted by the same allocator in both processes: at rest, between steps,
and at a step's peak. Ours contain the rows that a reduction has on the wire; of Gloo's own buffers neither side's are
counted. One rank without sharding says how much of the time's ratio is the model's code rather than sharding.

--python compares nt.fully_shard instead, on the same model of transformers as torch's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from rank_processes import environment, free_port  # noqa: E402

STEP_GOAL, BYTES_GOAL = 0.75, 0.84
WARM_UP, LEAST_STEPS, MOST_STEPS = 2, 3, 9
COMPARED_LOSSES = 3
# Relative. What the two add up in another order grows from step to step; bfloat16 has three digits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
CASES = [("float32", 1), ("float32", 2), ("bfloat16", 2), ("float32", 4), ("bfloat16", 4)]
PYTHON_CASES = [("float32", 2)]


def write_model(directory):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class World:
    """A program on every rank; rank 0 takes a step for each line that it is sent."""

    def __init__(self, command, ranks, limit_s, errors):
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.command = command
        self.errors = errors
        self.processes = []
        for rank in range(ranks):
            first = rank == 0
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=environment(RANK=rank, LOCAL_RANK=rank, **place),
                    stdin=subprocess.PIPE if first else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if first else subprocess.DEVNULL,
                    stderr=self.errors,
                    text=True,
                )
            )
        # A rank that hangs must not take the benchmark with it: a killed one ends the reading below.
        self.alarm = threading.Timer(limit_s, self.kill)
        self.alarm.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.alarm.cancel()
        self.kill()
        for process in self.processes:
            process.wait()

    def kill(self):
        for process in self.processes:
            process.kill()

    def answer(self):
        line = self.processes[0].stdout.readline()
        if not line:
            self.errors.seek(0)
            sys.exit(f"fsdp2_step: {self.command[0]} ended or was too slow:\n{self.errors.read()[-4000:]}")
        return line

    def until_ready(self):
        while self.answer().strip() != "ready":
            pass

    def step(self):
        self.processes[0].stdin.write("step\n")
        self.processes[0].stdin.flush()
        return json.loads(self.answer())

    def close(self):
        self.processes[0].stdin.close()
        for process in self.processes:
            if process.wait() != 0:
                sys.exit(f"fsdp2_step: {self.command[0]} did not end well")


def check_losses(ours, theirs, dtype):
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if abs(a["loss"] - b["loss"]) > TOLERANCE[dtype] * abs(b["loss"]):
            sys.exit(f"fsdp2_step: not the same job: in step {number + 1} the losses are {a['loss']} and {b['loss']}")


def measure(commands, dtype, ranks, seconds):
    """What each step of ours and theirs told, without those that warm up."""
    deadline = time.monotonic() + seconds
    steps = ([], [])
    with ExitStack() as stack:
        worlds = []
        for command in commands:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            worlds.append(stack.enter_context(World([*command, dtype], ranks, seconds + 240, errors)))
        for world in worlds:
            world.until_ready()
        while len(steps[0]) < WARM_UP + MOST_STEPS:
            enough = len(steps[0]) >= WARM_UP + LEAST_STEPS
            if enough and time.monotonic() >= deadline:
                break
            order = (0, 1) if len(steps[0]) % 2 == 0 else (1, 0)
            for side in order:
                steps[side].append(worlds[side].step())
        for world in worlds:
            world.close()
    check_losses(steps[0][:COMPARED_LOSSES], steps[1][:COMPARED_LOSSES], dtype)
    return [side[WARM_UP:] for side in steps]


def median(steps, what):
    return statistics.median(step[what] for step in steps)


def print_figure(name, value, unit, goal=None):
    figure = {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "better": "lower"}
    print(json.dumps(figure, ensure_ascii=False), flush=True)


def report(dtype, ranks, ours, theirs, python):
    name = f"fsdp2_{'python_' if python else ''}{dtype}_{ranks}_ranks"
    mib = 1 << 20
    us = "nt.fully_shard" if python else "neap"
    for who, steps in ((us, ours), ("fully_shard" if ranks > 1 else "transformers", theirs)):
        times = [step["ms"] for step in steps]
        print(
            f"{dtype}, {ranks} ranks, {who}: {len(steps)} steps, median {median(steps, 'ms'):.0f} ms "
            f"({min(times):.0f} to {max(times):.0f}), {median(steps, 'rest') / mib:.1f} MiB at rest, "
            f"{median(steps, 'peak') / mib:.1f} at the peak",
            flush=True,
        )
    ratio = median(ours, "ms") / median(theirs, "ms")
    if ranks == 1:
        print_figure("fsdp2_without_sharding_step_ratio", ratio, "x")
        return
    print_figure(f"{name}_step_ratio", ratio, "x", STEP_GOAL)
    print_figure(f"{name}_peak_ratio", median(ours, "peak") / median(theirs, "peak"), "x", BYTES_GOAL)
    print_figure(f"{name}_rest_ratio", median(ours, "rest") / median(theirs, "rest"), "x")
    print_figure(f"{name}_ms", median(ours, "ms"), "ms")
    print_figure(f"{name}_peak", median(ours, "peak") / mib, "MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--python", action="store_true", help="our Python package, on the peer's model")
    parser.add_argument("--seconds", type=float, help="about how long all of it may take [130; with --python 40]")
    parser.add_argument("--case", action="append", metavar="DTYPE:RANKS", help="measure this alone; may be repeated")
    arguments = parser.parse_args()
    cases = [(dtype, int(ranks)) for dtype, ranks in (case.split(":") for case in arguments.case or [])]
    cases = cases or (PYTHON_CASES if arguments.python else CASES)
    seconds = arguments.seconds or (40 if arguments.python else 130)

    folder = arguments.build.resolve() / "benchmarks"
    counter = folder / "libneap_counting_allocator.so"
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as model:
        write_model(model)
        theirs = [sys.executable, ROOT / "benchmarks" / "fsdp2_peer.py", counter, model]
        ours = [folder / "shard_bench", "step", model]
        if arguments.python:
            ours = [*theirs, "--neaptide", folder.parent / "python"]
        for number, (dtype, ranks) in enumerate(cases):
            share = (end - time.monotonic()) / (len(cases) - number)
            report(dtype, ranks, *measure([ours, theirs], dtype, ranks, share), arguments.python)


if __name__ == "__main__":
    main()
