#!/usr/bin/env python3
"""How long the last full build and the last whole test run took here. Both write it down themselves.

`make build` does when it builds from nothing and the compiler cache has nothing of it, `make test` when all of it runs
and passes: to do either again would take longer than all benchmarks. --measure builds from nothing, in a folder of its
own and without the cache, and leaves that time instead.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "dev"
sys.path.insert(0, str(ROOT / "tools"))
from build import build, note_time, time_path  # noqa: E402


def measure(jobs):
    folder = ROOT / "build" / "build-time"
    shutil.rmtree(folder, ignore_errors=True)
    # Standard output carries figures alone.
    status, seconds = build(folder, jobs, environment=os.environ | {"CCACHE_DISABLE": "1"}, stdout=sys.stderr)
    if seconds is None:
        sys.exit(f"build_time: the build failed (exit status {status})")
    note_time(BUILD, seconds)
    shutil.rmtree(folder)


def report(name, path, goal, otherwise):
    if not path.exists():
        print(f"no figure {name}: {otherwise}")
        return
    print(f"{name}: of {time.strftime('%Y-%m-%d %H:%M', time.localtime(path.stat().st_mtime))}")
    value = json.loads(path.read_text())["seconds"]
    print(json.dumps({"name": name, "value": value, "unit": "s", "goal": goal, "better": "lower"}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="build from nothing first, for minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.measure:
        measure(options.jobs)
    report(
        "build_time_full_s",
        time_path(BUILD),
        480,
        "`make build` has not built from nothing here; --measure does",
    )
    report(
        "test_time_s",
        BUILD / "test-time.json",  # written by tools/run_tests.py
        600,
        "`make test` has not passed here since it was last begun",
    )


if __name__ == "__main__":
    main()
