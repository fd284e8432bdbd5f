"""The build under test: the folder that NEAP_BUILD_DIR names, or build/dev."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("NEAP_BUILD_DIR", ROOT / "build" / "dev")).resolve()  # whatever folder a test changes to


def built(program):
    """The program, which has to be there."""
    assert program.exists(), f"{program} is not built; run `make test`, or set NEAP_BUILD_DIR"
    return program
