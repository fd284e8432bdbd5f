#!/usr/bin/env python3
"""Times a full build from nothing, without the compiler cache, and says how long the last `make test` ran its tests."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def timed(command, environment):
    began = time.monotonic()
    # Standard output carries figures alone.
    subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, stdout=sys.stderr, check=True)
    return time.monotonic() - began


def figure(name, value, goal):
    print(json.dumps({"name": name, "value": value, "unit": "s", "goal": goal, "better": "lower"}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    build = ROOT / "build" / "build-time"
    shutil.rmtree(build, ignore_errors=True)
    environment = os.environ | {"CCACHE_DISABLE": "1", "NEAP_PYTHON": sys.executable}
    seconds = timed(["cmake", "--preset", "dev", "-B", build], environment)
    seconds += timed(["ninja", f"-j{options.jobs}", "-C", build, "--quiet"], environment)
    figure("build_time_full_s", round(seconds, 1), 480)
    test_time = ROOT / "build" / "dev" / "test-time.json"  # written by tools/run_tests.py
    if test_time.exists():
        figure("test_time_s", json.loads(test_time.read_text())["seconds"], 600)
    else:
        print("no figure test_time_s: `make test` has not passed here since it was last begun")


if __name__ == "__main__":
    main()
