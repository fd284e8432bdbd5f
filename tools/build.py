#!/usr/bin/env python3
"""Builds what `make test` tests, all of it. `make build` calls it.

A build from nothing that passed leaves how long it took, configuring included, in the build's build-time.json, for
`make bench`; not so when the compiler cache knew some of it already, since then it is the cache that was timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRESET = "dev"


def build(folder, jobs, *, environment=os.environ, **output):
    """The exit status, and the seconds of a whole build without the cache's help: else None."""
    from_nothing = not (folder / ".ninja_log").exists()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as notes:
        cache_log = Path(notes) / "ccache"
        environment = environment | {"NEAP_PYTHON": sys.executable, "CCACHE_STATSLOG": str(cache_log)}
        commands = [["ninja", f"-j{jobs}", "-C", str(folder)]]
        if not (folder / "build.ninja").exists():  # configuring again is Ninja's own business
            commands.insert(0, ["cmake", "--preset", PRESET, "-B", str(folder)])
        for command in commands:
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False, **output).returncode
            if status != 0:
                return status, None
        seconds = time.monotonic() - began
        helped = cache_log.exists() and "cache_hit" in cache_log.read_text()
    return 0, round(seconds, 1) if from_nothing and not helped else None


def time_path(folder):
    return folder / "build-time.json"


def note_time(folder, seconds):
    folder.mkdir(parents=True, exist_ok=True)
    time_path(folder).write_text(json.dumps({"seconds": seconds}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / PRESET)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    folder = options.build.resolve()
    status, seconds = build(folder, options.jobs)
    if seconds is not None:
        note_time(folder, seconds)
    return status


if __name__ == "__main__":
    sys.exit(main())
