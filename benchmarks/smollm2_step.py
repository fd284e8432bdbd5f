#!/usr/bin/env python3
"""Forward and backward of SmolLM2-135M: our C++ against transformers with sdpa, on the same cores in one run.

The two take turns, one step each, so that a machine that slows down or speeds up does so for both; the figure is the
ratio of the fastest steps. Same weights, same tokens, float32; both must find the same loss.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
GOAL = 1.0


def fetch_model():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "tools" / "fetch_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fetch()


class CppStep:
    def __init__(self, program, model_dir, batch, sequence, threads):
        command = [str(program), str(model_dir), str(batch), str(sequence), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready":
            sys.exit(f"smollm2_step: {program} did not start")

    def __call__(self):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        milliseconds, loss = self.process.stdout.readline().split()
        return float(milliseconds), float(loss)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class TransformersStep:
    def __init__(self, model_dir, batch, sequence):
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        tokens = (torch.arange(batch * (sequence + 1)) * 7919 % self.model.config.vocab_size).view(batch, -1)
        self.ids, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __call__(self):
        begin = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        # shift_labels: as the C++ side, every position has a label.
        loss = self.model(input_ids=self.ids, labels=self.labels, shift_labels=self.labels, use_cache=False).loss
        loss.backward()
        return (time.perf_counter() - begin) * 1e3, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each, after two that warm up")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    model_dir = fetch_model()
    program = arguments.build / "benchmarks" / "smollm2_step"
    cpp = CppStep(program, model_dir, arguments.batch, arguments.sequence, arguments.threads)
    python = TransformersStep(model_dir, arguments.batch, arguments.sequence)
    times = {cpp: [], python: []}
    for turn in range(arguments.steps + 2):
        losses = []
        for step in (cpp, python):
            milliseconds, loss = step()
            losses.append(loss)
            if turn >= 2:
                times[step].append(milliseconds)
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            sys.exit(f"smollm2_step: the losses differ: {losses}")
    cpp.close()

    for name, step in (("neap", cpp), ("transformers", python)):
        values = times[step]
        print(f"{name}: fastest {min(values):.0f} ms, median {statistics.median(values):.0f} ms of {len(values)} steps")
    ratio = min(times[cpp]) / min(times[python])
    figure = {"name": "smollm2_step_ratio", "value": round(ratio, 4), "unit": "x", "goal": GOAL, "better": "lower"}
    print(json.dumps(figure))


if __name__ == "__main__":
    main()
