"""tools/build.py: which builds leave their time for `make bench`."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

spec = importlib.util.spec_from_file_location("build_tool", ROOT / "tools" / "build.py")
build_tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_tool)

CMAKE = 'mkdir -p "$4" && touch "$4/build.ninja"'
NINJA = 'touch "$3/.ninja_log"; echo "$CACHE_SAYS" >> "$CCACHE_STATSLOG"; exit $STATUS'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Builds in one folder, with stand-ins for cmake and ninja: the exit status and the seconds."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, program in (("cmake", CMAKE), ("ninja", NINJA)):
        (tools / name).write_text(f"#!/bin/sh\n{program}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def build(cache_says="cache_miss", status=0):
        monkeypatch.setenv("CACHE_SAYS", cache_says)
        monkeypatch.setenv("STATUS", str(status))
        return build_tool.build(tmp_path / "build", 1)

    return build


def test_a_build_from_nothing_has_a_time_and_one_that_goes_on_has_none(run, tmp_path):
    status, seconds = run()
    assert status == 0
    assert 0 <= seconds < 60
    assert run() == (0, None)
    build_tool.note_time(tmp_path / "other", seconds)
    assert json.loads(build_tool.time_path(tmp_path / "other").read_text()) == {"seconds": seconds}


def test_what_the_compiler_cache_helped_with_has_no_time(run):
    assert run(cache_says="cache_miss\ndirect_cache_hit") == (0, None)


def test_a_build_that_fails_has_no_time_nor_has_the_one_that_ends_it(run):
    assert run(status=3) == (3, None)
    assert run() == (0, None)
