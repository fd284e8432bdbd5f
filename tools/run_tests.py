#!/usr/bin/env python3
"""Runs every C++ test (ctest) and every Python test (pytest) of one build and says how many there were.

Both run even when the first fails; the exit status is that of the worse. `make test` calls it. How long a whole run
that passed took is left in the build's test-time.json, for `make bench`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_ctest(build, results, arguments):
    """Exit status and (tests, failures) counted test by test: ctest itself counts programs."""
    results.mkdir(parents=True, exist_ok=True)
    for old in results.glob("*.json"):
        old.unlink()
    # A value that ends in a slash is a folder: each test program writes a file of its own name there.
    environment = os.environ | {"GTEST_OUTPUT": f"json:{results}/", "GTEST_COLOR": "no"}
    command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", *arguments]
    status = subprocess.run(command, env=environment, check=False).returncode
    reports = [json.loads(path.read_text()) for path in results.glob("*.json")]
    return status, sum(report["tests"] for report in reports), sum(report["failures"] for report in reports)


def make(build, jobs, arguments):
    """Builds the programs of the chosen tests; all of the build when none are chosen."""
    chosen = []
    if arguments:
        # Tests of files that came since the build was configured are to be on the list.
        subprocess.run(["ninja", "-C", str(build), "--quiet", "build.ninja"], check=True)
        listing = ["ctest", "--test-dir", str(build), "--show-only=json-v1", *arguments]
        tests = json.loads(subprocess.run(listing, capture_output=True, text=True, check=True).stdout)["tests"]
        # A test that is one of our programs has the name of its target (add_layer); others build what they need.
        chosen = [test["name"] for test in tests if test["name"].endswith("_tests")]
        if not chosen:
            print(f"run_tests: no test program matches {arguments[-1]!r}")
            return 1
    return subprocess.run(["ninja", "-C", str(build), f"-j{jobs}", *chosen], check=False).returncode


def run_pytest(build, jobs):
    # One thread an operator, as for ctest. A file's tests stay together, since they share what they have made.
    environment = os.environ | {"NEAP_BUILD_DIR": str(build), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "pytest", "--quiet", "--durations=5", "--durations-min=5"]
    command += [f"--numprocesses={jobs}", "--dist=loadfile"]
    # Those of the package make the simulated device part of their process, which it has to be from the beginning and
    # the others are not to see.
    apart = "tests/python"
    runs = (["tests", f"--ignore={apart}"], [apart])
    return max(subprocess.run([*command, *what], env=environment, cwd=ROOT, check=False).returncode for what in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "dev")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--no-pytest", action="store_true", help="C++ tests alone (sanitizer builds)")
    parser.add_argument("--make", action="store_true", help="build the chosen tests first")
    parser.add_argument("--regex", help="only C++ tests with a name that matches this expression")
    options = parser.parse_args()
    build = options.build.resolve()

    filters = ["--tests-regex", options.regex] if options.regex else []
    if options.make and make(build, options.jobs, filters) != 0:
        return 1
    time_path = build / "test-time.json"
    time_path.unlink(missing_ok=True)
    began = time.monotonic()
    status, tests, failures = run_ctest(build, build / "test-results", ["--parallel", str(options.jobs), *filters])
    print(
        f"\nC++: {tests} tests, {failures} failed, {time.monotonic() - began:.0f} s"
        f"{'' if status == 0 else '; ctest reports a failure, see above'}",
        flush=True,
    )
    if options.no_pytest:
        return status

    print(flush=True)
    python_began = time.monotonic()
    python_status = run_pytest(build, options.jobs)
    ended = time.monotonic()
    print(f"Python: {'passed' if python_status == 0 else 'failed'}, {ended - python_began:.0f} s", flush=True)
    if not filters and status == 0 and python_status == 0:
        time_path.write_text(json.dumps({"seconds": round(ended - began, 1)}) + "\n")
    return status or python_status


if __name__ == "__main__":
    sys.exit(main())
