#!/usr/bin/env python3
"""Runs the benchmarks of registry.toml and writes results.json and results.md. `make bench` calls it.

A whole run replaces all figures. `--only NAME` runs some benchmarks and replaces their figures alone, and only on the
machine that measured the others: figures of two machines are not to be read side by side.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FIELDS = {"name", "value", "unit", "goal", "better"}


class FormatError(Exception):
    pass


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def parse_figure(line):
    """The figure that a line of output holds, or None for a line that is for people."""
    if not line.startswith("{"):
        return None
    try:
        figure = json.loads(line)
    except json.JSONDecodeError as error:
        raise FormatError(f"neither a figure nor text for people: {line.strip()}") from error
    if set(figure) != FIELDS:
        raise FormatError(f"a figure has exactly {', '.join(sorted(FIELDS))}; found {line.strip()}")
    if not is_number(figure["value"]) or not (figure["goal"] is None or is_number(figure["goal"])):
        raise FormatError(f"value must be a number, goal a number or null; found {line.strip()}")
    if figure["better"] not in ("lower", "higher"):
        raise FormatError(f'better must be "lower" or "higher"; found {line.strip()}')
    return figure


def machine():
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "compiler": compiler,
        "torch": importlib.metadata.version("torch"),
    }


def run_benchmark(benchmark, build):
    """Figures of one benchmark by name; FormatError or CalledProcessError when it fails."""
    text = benchmark["command"].format(build=build, python=sys.executable)
    # As a person would type it: paths of this checkout's own are relative.
    shown = benchmark["command"].format(build=os.path.relpath(build, FOLDER.parent), python="python3")
    figures = {}
    done = subprocess.run(
        shlex.split(text),
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=benchmark["limit_s"],
        check=True,
    )
    for line in done.stdout.splitlines():
        figure = parse_figure(line)
        if figure is None:
            print(f"  {line}")
            continue
        name = figure.pop("name")
        if name in figures:
            raise FormatError(f"figure {name} printed twice")
        figures[name] = {**figure, "command": shown}
    if not figures and not benchmark.get("may_have_none"):
        raise FormatError("printed no figure")
    return figures


def met(figure):
    if figure["goal"] is None:
        return ""
    good = figure["value"] <= figure["goal"] if figure["better"] == "lower" else figure["value"] >= figure["goal"]
    return "yes" if good else "no"


def markdown(results):
    place = results["machine"]
    lines = [
        "# Measured",
        "",
        "Written by `make bench` from `results.json`; not edited by hand.",
        "",
        f"{place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB",
        f"{place['compiler']}, torch {place['torch']}",
        "",
        "| figure | value | unit | goal | met | command |",
        "|---|---:|---|---:|---|---|",
    ]
    for name, figure in results["figures"].items():
        sign = "≤" if figure["better"] == "lower" else "≥"
        goal = "" if figure["goal"] is None else f"{sign} {figure['goal']:g}"
        row = [name, f"{figure['value']:.5g}", figure["unit"], goal, met(figure), f"`{figure['command']}`"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def read_registry(path):
    benchmarks = tomllib.loads(path.read_text())["benchmark"]
    names = [benchmark["name"] for benchmark in benchmarks]
    if len(set(names)) != len(names):
        raise FormatError(f"{path.name}: a benchmark is registered twice")
    return benchmarks


def former_figures(path, here):
    """What an earlier run on this machine measured."""
    if not path.exists():
        return {}
    former = json.loads(path.read_text())
    if former["machine"] != here:
        print(f"bench: {path.name} is of another machine; its figures are dropped")
        return {}
    return former["figures"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=FOLDER.parent / "build" / "release")
    parser.add_argument("--registry", type=Path, default=FOLDER / "registry.toml")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of results.json and results.md")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this benchmark alone; may be repeated")
    options = parser.parse_args()

    benchmarks = read_registry(options.registry)
    unknown = set(options.only or []) - {benchmark["name"] for benchmark in benchmarks}
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    chosen = [b for b in benchmarks if not options.only or b["name"] in options.only]
    results_path = options.out / "results.json"
    results = {"machine": machine(), "figures": {}}
    if options.only:
        results["figures"] = former_figures(results_path, results["machine"])

    failed = []
    for benchmark in chosen:
        began = time.monotonic()
        print(f"bench: {benchmark['name']} …", flush=True)
        try:
            results["figures"] |= run_benchmark(benchmark, options.build.resolve())
        except (FormatError, OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(benchmark["name"])
            print(f"bench: {benchmark['name']} failed: {error}")
        print(f"bench: {benchmark['name']}: {time.monotonic() - began:.0f} s", flush=True)

    results_path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    (options.out / "results.md").write_text(markdown(results))
    print(f"bench: {len(results['figures'])} figures in {results_path}")
    if failed:
        print(f"bench: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
