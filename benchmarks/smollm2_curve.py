#!/usr/bin/env python3
"""SmolLM2-135M fine-tuned on real text: `neap train` against transformers with torch.optim.AdamW, on the same cores.

The same fifty steps twice, in float32: same weights, same sequences in the same order, same schedule, clipping and
groups of weight decay. AdamW is torch's fused one. The two take turns, one step each: `neap` stands still (SIGSTOP)
while the other one runs, so that a machine that slows down or speeds up does so for both; speeds are those of the
median steps. At the end transformers evaluates the directory that `neap` leaves on the data that `neap` evaluated on.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from smollm2_step import ROOT, fetch_model
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from transformers import AutoModelForCausalLM

# Both sides are told this; `neap` as its run file.
SETTINGS = {
    "train": {"steps": 50, "batch": 1, "sequence": 256, "accumulation": 1},
    "optim": {
        "lr": 1e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay": "matrices",
        "schedule": "cosine",
        "warmup": 5,
        "final_ratio": 0.1,
        "clip": 1.0,
    },
}
EVALUATED = 4  # sequences
LLMC_HEADER = 1024  # bytes before the tokens of the quick start's file
WARM_UP = 2  # steps whose time does not count
LOSS_GOAL, SPEED_GOAL, EVALUATION_GOAL = 1e-4, 1.0, 1e-5


@dataclass
class Step:
    loss: float
    grad_norm: float
    lr: float
    seconds: float


class NeapRun:
    """`neap train`, which runs while step() waits for a step and stands still in between."""

    def __init__(self, neap, folder, run_file, threads):
        self.folder = folder
        path = folder / "run.yaml"
        path.write_text(json.dumps(run_file))  # JSON is YAML
        self.log = (folder / "log.txt").open("w+")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [neap, "train", path], env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.seconds = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()

    def step(self):
        begin = time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        for line in self.process.stdout:
            if re.match(r"step \d+/\d+ ", line):
                break
        else:
            self.fail()
        self.process.send_signal(signal.SIGSTOP)
        self.seconds.append(time.perf_counter() - begin)

    def finish(self):
        """All steps, and the loss on the held-out data after them."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdout.read()
        if self.process.wait() != 0:
            self.fail()
        lines = [json.loads(line) for line in (self.folder / "out" / "metrics.jsonl").read_text().splitlines()]
        steps = [
            Step(line["loss"], line["grad_norm"], line["lr"], seconds)
            for line, seconds in zip(lines, self.seconds, strict=True)
        ]
        return steps, lines[-1]["eval_loss"]

    def fail(self):
        self.process.kill()
        self.log.seek(0)
        sys.exit(f"smollm2_curve: neap train failed:\n{self.log.read()}")


def load(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")


def rows(tokens, first, count, sequence):
    """(inputs, labels) of sequences in the order of the file; every position has a label."""
    begins = range(first * sequence, (first + count) * sequence, sequence)
    block = torch.from_numpy(np.stack([tokens[begin : begin + sequence + 1] for begin in begins]).astype(np.int64))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def schedule_of(optimizer, optim, steps):
    """torch's own schedulers. The first step of what follows the warm-up has the peak, which is the warm-up's last."""
    after = {
        "constant": lambda length: ConstantLR(optimizer, 1.0, 1),
        "linear": lambda length: LinearLR(optimizer, 1.0, optim["final_ratio"], length),
        "cosine": lambda length: CosineAnnealingLR(optimizer, length, optim["lr"] * optim["final_ratio"]),
    }[optim["schedule"]]
    rise = max(optim["warmup"] - 1, 0)
    main = after(steps - 1 - rise)
    if rise == 0:
        return main
    return SequentialLR(optimizer, [LinearLR(optimizer, 1 / optim["warmup"], 1.0, rise), main], [rise])


class TransformersRun:
    def __init__(self, model_dir, settings, tokens):
        self.train, self.optim, self.tokens = settings["train"], settings["optim"], tokens
        self.model = load(model_dir).train()
        parameters = list(self.model.parameters())
        decays = [self.optim["decay"] == "all" or p.dim() >= 2 for p in parameters]
        groups = [
            {"params": [p for p, d in zip(parameters, decays, strict=True) if d == decay], "weight_decay": rate}
            for decay, rate in ((True, self.optim["weight_decay"]), (False, 0.0))
        ]
        options = {"lr": self.optim["lr"], "betas": self.optim["betas"], "eps": self.optim["eps"]}
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **options, fused=True)
        self.schedule = schedule_of(self.optimizer, self.optim, self.train["steps"])
        self.steps = []

    def step(self):
        begin = time.perf_counter()
        batch, parts = self.train["batch"], self.train["accumulation"]
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in range(parts):
            ids, labels = rows(self.tokens, (len(self.steps) * parts + part) * batch, batch, self.train["sequence"])
            # shift_labels: as in neap, every position has a label.
            mean = self.model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss / parts
            mean.backward()
            loss += mean.item()
        norm = clip_grad_norm_(self.model.parameters(), self.optim["clip"] or math.inf).item()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        self.steps.append(Step(loss, norm, lr, time.perf_counter() - begin))


def evaluate(model_dir, tokens, sequence):
    """The mean loss of a directory's model over all tokens that make whole sequences."""
    model = load(model_dir).eval()
    losses = []
    with torch.no_grad():
        for row in range((len(tokens) - 1) // sequence):
            ids, labels = rows(tokens, row, 1, sequence)
            losses.append(model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss.item())
    return statistics.fmean(losses)


@dataclass
class Comparison:
    ours: list[Step]
    theirs: list[Step]
    evaluation: tuple[float, float]  # by neap, and by transformers from what neap left
    saved: Path

    def largest(self, what):
        """Of all steps, the largest relative difference of a number."""
        pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(self.ours, self.theirs, strict=True)]
        return max(relative(a, b) for a, b in pairs)

    def median_seconds(self):
        # The last step of neap has its evaluation in it.
        return [statistics.median(step.seconds for step in side[WARM_UP:-1]) for side in (self.ours, self.theirs)]


def relative(found, expected):
    return abs(found - expected) / abs(expected)


def compare(neap, model_dir, settings, *, tokens, held_out, folder, threads):
    """Both runs and the evaluation, with `folder` for what they write; `tokens` and `held_out` are arrays."""
    for name, array in (("train.bin", tokens), ("held-out.bin", held_out)):
        (folder / name).write_bytes(array.astype("<u2").tobytes())
    run_file = settings | {
        "model": {"path": str(model_dir)},
        "data": {"path": str(folder / "train.bin"), "shuffle": False, "eval": str(folder / "held-out.bin")},
        "checkpoint": {"export": True},
        "log": {"dir": str(folder / "out")},
    }
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        ours = stack.enter_context(NeapRun(neap, folder, run_file, threads))
        theirs = TransformersRun(model_dir, settings, tokens)
        for step in range(settings["train"]["steps"]):
            for side in (ours, theirs) if step % 2 == 0 else (theirs, ours):
                side.step()
        steps, evaluated = ours.finish()
    saved = folder / "out" / "hf"
    again = evaluate(saved, held_out, settings["train"]["sequence"])
    return Comparison(steps, theirs.steps, (evaluated, again), saved)


def read_tokens(model_dir):
    """The text of the quick start: sources of Python's standard library."""
    path = ROOT / "data" / "quickstart.bin"
    if not path.exists():
        command = [sys.executable, "tools/tokenize_text.py", "--python-stdlib", "--model", model_dir, "--out", path]
        subprocess.run([*command, "--max-bytes", "4000000"], cwd=ROOT, check=True)
    return np.fromfile(path, dtype="<u2", offset=LLMC_HEADER)


def print_figure(name, value, unit, goal, better):
    print(json.dumps({"name": name, "value": value, "unit": unit, "goal": goal, "better": better}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=SETTINGS["train"]["steps"])
    arguments = parser.parse_args()

    model_dir = fetch_model()
    settings = SETTINGS | {"train": SETTINGS["train"] | {"steps": arguments.steps}}
    tokens = read_tokens(model_dir)
    train = settings["train"]
    needed = train["steps"] * train["batch"] * train["accumulation"] * train["sequence"] + 1
    held_out = tokens[-(EVALUATED * train["sequence"] + 1) :]
    neap = arguments.build.resolve() / "cli" / "neap"
    with tempfile.TemporaryDirectory() as folder:
        data = {"tokens": tokens[:needed], "held_out": held_out}
        found = compare(neap, model_dir, settings, **data, folder=Path(folder), threads=arguments.threads)

    for number, (a, b) in enumerate(zip(found.ours, found.theirs, strict=True), 1):
        if number in (1, 2, 5) or number % 10 == 0:
            print(f"step {number}: loss {a.loss:.7f} and {b.loss:.7f}, norm {a.grad_norm:.6f} and {b.grad_norm:.6f}")
    ours, theirs = found.median_seconds()
    print(f"median step: neap {ours * 1e3:.0f} ms, transformers {theirs * 1e3:.0f} ms")
    print(f"held-out loss: {found.evaluation[0]:.7f} by neap, {found.evaluation[1]:.7f} by transformers")
    print_figure("smollm2_curve_loss_difference", found.largest("loss"), "relative", LOSS_GOAL, "lower")
    print_figure("smollm2_curve_eval_difference", relative(*found.evaluation), "relative", EVALUATION_GOAL, "lower")
    print_figure("smollm2_curve_tokens_per_s_ratio", round(theirs / ours, 4), "x", SPEED_GOAL, "higher")


if __name__ == "__main__":
    main()
