"""benchmarks/run.py: what it accepts from a benchmark, what it writes, and that the results in the tree are its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "run.py"
FIELDS = {"value", "unit", "goal", "better", "command"}

spec = importlib.util.spec_from_file_location("bench_run", SCRIPT)
bench_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_run)

GOOD = '{"name": "step_ratio", "value": 1.004, "unit": "x", "goal": 1.01, "better": "lower"}'


def registry(tmp_path, **programs):
    """A registry of benchmarks that are small Python programs."""
    text = ""
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
        text += f'[[benchmark]]\nname = "{name}"\ncommand = "{{python}} {tmp_path}/{name}.py"\nlimit_s = 20\n'
    path = tmp_path / "registry.toml"
    path.write_text(text)
    return path


def run(path, *arguments):
    command = [sys.executable, SCRIPT, "--registry", path, "--out", path.parent, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = path.parent / "results.json"
    return done, json.loads(results.read_text()) if results.exists() else None


def test_figures_are_merged_and_shown(tmp_path):
    path = registry(
        tmp_path, one=f"print('hello')\nprint('''{GOOD}''')", two=f"print('''{GOOD.replace('step', 'r')}''')"
    )
    done, results = run(path)
    assert done.returncode == 0, done.stdout
    assert "hello" in done.stdout
    assert list(results["figures"]) == ["step_ratio", "r_ratio"]
    assert set(results["figures"]["step_ratio"]) == FIELDS
    assert results["figures"]["step_ratio"]["command"].startswith("python3 ")
    table = (tmp_path / "results.md").read_text()
    assert "| step_ratio | 1.004 | x | ≤ 1.01 | yes |" in table


def test_only_keeps_the_other_figures(tmp_path):
    path = registry(tmp_path, one=f"print('''{GOOD}''')", two=f"print('''{GOOD.replace('step', 'r')}''')")
    run(path)
    (tmp_path / "two.py").write_text(f"print('''{GOOD.replace('step', 'r').replace('1.004', '2')}''')")
    done, results = run(path, "--only", "two")
    assert done.returncode == 0, done.stdout
    assert {name: figure["value"] for name, figure in results["figures"].items()} == {"step_ratio": 1.004, "r_ratio": 2}
    assert "| r_ratio | 2 | x | ≤ 1.01 | no |" in (tmp_path / "results.md").read_text()


def test_a_failing_benchmark_fails_the_run_and_not_the_others(tmp_path):
    path = registry(tmp_path, bad="raise SystemExit(3)", mute="", good=f"print('''{GOOD}''')")
    done, results = run(path)
    assert done.returncode == 1
    assert "bench: failed: bad, mute" in done.stdout
    assert list(results["figures"]) == ["step_ratio"]


def test_a_benchmark_that_may_have_no_figure_does_not_fail_without_one(tmp_path):
    path = registry(tmp_path, mute="")
    path.write_text(path.read_text() + "may_have_none = true\n")
    done, results = run(path)
    assert done.returncode == 0, done.stdout
    assert results["figures"] == {}


def test_an_unknown_name_is_refused(tmp_path):
    done, results = run(registry(tmp_path, one=""), "--only", "three")
    assert done.returncode == 2
    assert "no such benchmark: three" in done.stderr
    assert results is None


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "a", "value": 1}',
        '{"name": "a", "value": NaN, "unit": "s", "goal": null, "better": "lower"}',
        '{"name": "a", "value": true, "unit": "s", "goal": null, "better": "lower"}',
        '{"name": "a", "value": 1, "unit": "s", "goal": "low", "better": "lower"}',
        '{"name": "a", "value": 1, "unit": "s", "goal": null, "better": "smaller"}',
        '{"name": "a", "value": 1, "unit": "s", "goal": null, "better": "lower", "more": 1}',
        '{"name": ',
    ],
)
def test_a_malformed_figure_is_refused(line):
    with pytest.raises(bench_run.FormatError):
        bench_run.parse_figure(line)


def test_the_results_in_the_tree_have_the_format_and_their_table_is_current():
    path = ROOT / "benchmarks" / "results.json"
    if not path.exists():  # nothing measured yet: then there must be no table either
        assert not path.with_suffix(".md").exists()
        return
    results = json.loads(path.read_text())
    assert set(results) == {"machine", "figures"}
    assert results["figures"]
    for name, figure in results["figures"].items():
        assert set(figure) == FIELDS, name
        assert bench_run.parse_figure(json.dumps({"name": name, **{k: figure[k] for k in FIELDS - {"command"}}}))
    assert path.with_suffix(".md").read_text() == bench_run.markdown(results)


def test_every_registered_command_names_a_file_of_this_tree_or_of_the_build():
    for benchmark in bench_run.read_registry(ROOT / "benchmarks" / "registry.toml"):
        files = [word for word in benchmark["command"].split() if "/" in word]
        assert files, benchmark["name"]
        for file in files:
            assert file.startswith("{build}/") or (ROOT / file).exists(), benchmark["name"]
