"""`neaptide report`: what is on the page is what the run left, and what it left in a bad state is named."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from neaptide_command import neaptide
from rank_processes import end, rank_processes

from neaptide.report import over_steps, over_time, report
from neaptide.report.run_directory import read_run_directory
from neaptide.report.trace import FIRST_LINE, Spans, Trace, Window, merge, merged, thinned

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from neap_command import Workspace, binary
from test_hyperparallel_664 import CONFIG as DEEPSEEK


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of real runs, by name."""
    workspace = Workspace(tmp_path_factory.mktemp("runs"))
    trace = "--log.trace=true"
    slow = ["--device.h2d=100MB/s", "--device.d2h=100MB/s", "--offload.prefetch=0"]
    evaluation = ["--data.eval=text.txt", "--train.eval_every=2", "--train.eval_batches=1"]
    for arguments, code in (
        (["--log.dir=offload", "--offload.mode=async", trace, *slow, *evaluation], 0),
        (["--log.dir=both", "--offload.mode=async", "--recompute.mode=full", trace, "--train.steps=12"], 0),
        (["--log.dir=plain"], 0),
        (["--log.dir=cpu", "--device.type=cpu", "--offload.mode=async", trace], 0),
    ):
        result = workspace.train(*arguments)
        assert result.code == code, result.err
    capacity = workspace.summary("plain")["peak_bytes"] - 1
    assert workspace.train("--log.dir=short", trace, f"--device.capacity={capacity}").code == 3
    command = [binary(), "train", "run.yaml", "--log.dir=ranks", trace]
    with rank_processes([command] * 2, cwd=workspace.path) as processes:
        assert [end(process)[0] for process in processes] == [0, 0]
    return workspace.path


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run's directory, to be damaged."""

    def make(name):
        shutil.copytree(runs / name, tmp_path / name)
        return tmp_path / name

    return make


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def page(directory, tmp_path):
    return report(directory, tmp_path / "page.html").read_text()


def figures(text):
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)[1])


def numbers(values):
    """Plotly packs arrays of numpy; lists stay as they are."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return values


def traces(figure):
    """Name → the figure's trace of that name, the first one with data."""
    out = {}
    for trace in figure["data"]:
        if trace.get("x") not in (None, [None]):
            out.setdefault(trace.get("name", ""), trace)
    return out


def unit(figure):
    """Bytes of what the axis counts in."""
    name = re.search(r"\((\w+)\)", figure["layout"]["yaxis"]["title"]["text"])[1]
    return {"MiB": 1 << 20, "KiB": 1 << 10}[name]


# ---- the numbers


def test_curves_over_the_steps_are_those_of_the_metrics(runs, tmp_path):
    steps = metrics(runs / "offload")
    curves = traces(figures(page(runs / "offload", tmp_path))["training"])
    for name, key in (
        ("loss", "loss"),
        ("gradient norm", "grad_norm"),
        ("tokens per second", "tokens_per_s"),
        ("learning rate", "lr"),
    ):
        assert numbers(curves[name]["x"]) == [1, 2, 3]
        assert numbers(curves[name]["y"]) == [step[key] for step in steps], name
    held_out = [(step["step"], step["eval_loss"]) for step in steps if step["eval_loss"] is not None]
    assert [step for step, _ in held_out] == [2, 3]
    pairs = zip(numbers(curves["held-out loss"]["x"]), numbers(curves["held-out loss"]["y"]), strict=True)
    assert list(pairs) == held_out


def test_the_peak_is_stacked_of_its_parts(runs, tmp_path):
    steps = metrics(runs / "offload")
    figure = figures(page(runs / "offload", tmp_path))["peak"]
    bars = traces(figure)
    size = unit(figure)
    for key, (label, _) in over_steps.PARTS.items():
        assert np.multiply(numbers(bars[label]["y"]), size).tolist() == [step["peak_parts"][key] for step in steps]
    stacked = sum(np.array(numbers(bar["y"])) for bar in bars.values()) * size
    assert stacked.round().astype(int).tolist() == [step["device_peak"] for step in steps]


def test_planned_measured_late_reloads_and_waits_are_those_of_the_metrics(runs, tmp_path):
    steps = metrics(runs / "offload")
    found = figures(page(runs / "offload", tmp_path))
    bars = traces(found["drops"])
    for label, key in ("planned", "planned_drop"), ("measured", "measured_drop"):
        assert np.multiply(numbers(bars[label]["y"]), 1 << 10).tolist() == [step[key] for step in steps]
    bars = traces(found["link"])
    assert numbers(bars["late reloads"]["y"]) == [step["late_reloads"] for step in steps]
    assert sum(numbers(bars["late reloads"]["y"])) > 0
    assert numbers(bars["exposed wait"]["y"]) == [step["exposed_wait_ms"] for step in steps]
    assert np.multiply(numbers(bars["out"]["y"]), 1 << 10).tolist() == [step["offloaded_bytes"] for step in steps]
    assert np.multiply(numbers(bars["in"]["y"]), 1 << 10).tolist() == [step["reloaded_bytes"] for step in steps]


def test_tiles_say_what_the_final_table_says(runs, tmp_path):
    text = page(runs / "offload", tmp_path)
    summary = json.loads((runs / "offload" / "summary.json").read_text())
    assert f"{summary['loss'][-1]:.4f}" in text and f"from {summary['loss'][0]:.4f} at step 1" in text
    assert f'<div class="value">{summary["ratio"]:.4f}</div>' in text
    assert f'<div class="value">{summary["device_step_ms"]:.1f} ms</div>' in text
    assert f"{summary['late_reloads']} late reloads, {summary['exposed_wait_ms']:.1f} ms exposed wait" in text
    assert f'<div class="value">{summary["peak_bytes"] / 1024:.2f} KiB</div>' in text
    assert "in the backward of model.layers." in text
    assert ">finished</span>" in text


def test_memory_over_time_reaches_the_measured_peak(runs, tmp_path):
    figure = figures(page(runs / "offload", tmp_path))["memory"]["views"][0]["figure"]
    curve = traces(figure)["gradients, activations, workspace"]
    parts = metrics(runs / "offload")[0]["peak_parts"]
    peak = json.loads((runs / "offload" / "summary.json").read_text())["peak_bytes"]
    assert max(numbers(curve["y"])) * unit(figure) == peak
    state = traces(figure)["optimizer state"]
    assert max(numbers(state["y"])) * unit(figure) == parts["parameters"] + parts["optimizer"]


def test_the_timeline_holds_every_span_of_a_step(runs, tmp_path):
    found = figures(page(runs / "offload", tmp_path))["timeline"]
    assert len(found["views"]) == 4  # the whole run and its three steps
    trace = Trace.read(runs / "offload" / "trace.json")
    step = trace.steps()[1]
    drawn = {}
    for bar in found["views"][2]["figure"]["data"]:
        if bar["type"] == "bar" and bar["x"] != [None]:
            drawn[bar["name"]] = drawn.get(bar["name"], 0) + len(bar["x"])
    compute = trace.spans["sim:0/compute"]
    inside = compute.of((compute.end > step.begin) & (compute.begin < step.end))
    waits = sum(trace.names[name] == "wait" for name in inside.name)
    assert drawn["compute waits"] == waits > 0
    assert drawn["compute"] == len(inside) - waits > 100
    assert drawn["copies out"] > 0 and drawn["copies in"] > 0
    assert "every one of its" in found["views"][2]["notes"][0]
    late = [mark["x"] for mark in found["views"][2]["figure"]["data"] if mark["name"] == "late reloads"]
    assert len(late[0]) == metrics(runs / "offload")[1]["late_reloads"]


def test_of_many_steps_some_have_a_view_and_the_page_says_so(runs, tmp_path):
    text = page(runs / "both", tmp_path)
    views = figures(text)["timeline"]["views"]
    assert 3 < len(views) <= 1 + over_time.MOST_WINDOWS
    assert "Of 12 steps those that differ most have a view of their own." in text
    assert "recomputation (host)" in traces(views[2]["figure"])
    assert '<div class="value">48 units</div>' in text


def test_ranks_of_one_world_are_one_page(runs, tmp_path):
    text = page(runs / "ranks", tmp_path)
    assert "several ranks, of which times and bytes are those of rank 0" in text
    found = figures(text)
    assert "collectives" in traces(found["timeline"]["views"][2]["figure"])
    assert "Parameters come and go" in found["memory"]["views"][0]["notes"][0]


def test_the_load_of_experts_is_that_of_the_last_step(tmp_path):
    workspace = Workspace(tmp_path)
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(DEEPSEEK | {"num_hidden_layers": 3, "first_k_dense_replace": 1})
    )
    assert workspace.train("--model.init=random", "--device.type=cpu").code == 0
    (heat,) = figures(page(tmp_path / "out", tmp_path))["experts"]["data"]
    load = metrics(tmp_path / "out")[-1]["expert_load"]
    assert heat["customdata"] == load
    for share, layer in zip(heat["z"], load, strict=True):
        assert share == pytest.approx([count * len(layer) / sum(layer) for count in layer])


def test_a_run_without_a_trace_says_how_to_get_one(runs, tmp_path):
    text = page(runs / "plain", tmp_path)
    assert text.count("--log.trace=true") == 2
    assert "Nothing was offloaded." in text
    assert set(figures(text)) == {"peak", "training"}


def test_a_plain_cpu_has_host_times_from_zero_and_no_memory(runs, tmp_path):
    text = page(runs / "cpu", tmp_path)
    assert "A plain CPU counts no memory." in text
    figure = figures(text)["timeline"]["views"][0]["figure"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "ms (host's clock)"
    assert figure["layout"]["xaxis"]["range"][0] == 0


def test_a_run_out_of_memory_shows_how_memory_ran_out(runs, tmp_path):
    text = page(runs / "short", tmp_path)
    assert '<span class="chip bad">out of memory</span>' in text
    summary = json.loads((runs / "short" / "summary.json").read_text())
    for part in (
        "out of memory in the ",
        "what held the memory",
        "optimizer state",
        "what would lower it",
        "offload.mode: async",
    ):
        assert part in re.search(r'<section class="alarm">(.*?)</section>', text, re.DOTALL)[1], part
    figure = figures(text)["memory"]["views"][0]["figure"]
    assert (
        max(numbers(traces(figure)["all kinds"]["y"])) * unit(figure)
        == summary["peak_bytes"]
        <= summary["capacity_bytes"]
    )


def test_a_run_that_has_not_ended_can_be_looked_at(copy, tmp_path):
    directory = copy("plain")
    (directory / "summary.json").unlink()
    assert ">still running, or killed</span>" in page(directory, tmp_path)


def test_a_run_that_went_on_shows_all_its_steps(tmp_path):
    workspace = Workspace(tmp_path)
    keep = ["--checkpoint.every=2", "--checkpoint.resume=auto", "--log.trace=true"]
    assert workspace.train(*keep, "--train.steps=2").code == 0
    assert workspace.train(*keep, "--train.steps=4").code == 0
    found = figures(page(tmp_path / "out", tmp_path))
    loss = traces(found["training"])["loss"]
    assert numbers(loss["x"]) == [1, 2, 3, 4]
    assert numbers(loss["y"]) == [step["loss"] for step in metrics(tmp_path / "out")]
    assert len(found["timeline"]["views"]) == 3  # the trace is of the steps since: 3 and 4
    assert found["timeline"]["views"][1]["notes"][0].startswith("step 3: ")


def test_steps_that_were_skipped_are_gaps(tmp_path):
    workspace = Workspace(tmp_path)
    wild = ["--optim.lr=1000", "--optim.clip=0", "--train.steps=50", "--train.non_finite=skip", "--device.type=cpu"]
    assert workspace.train(*wild).code == 0
    steps = metrics(tmp_path / "out")
    skipped = [step["step"] for step in steps if step["loss"] is None or step["grad_norm"] is None]
    assert skipped
    curves = traces(figures(page(tmp_path / "out", tmp_path))["training"])
    for name, key in ("loss", "loss"), ("gradient norm", "grad_norm"):
        assert numbers(curves[name]["y"]) == [step[key] for step in steps if step[key] is not None]


def test_the_run_file_is_there_and_harmless(copy, tmp_path):
    directory = copy("plain")
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace('path: "model"', 'path: "</script><b>model"'))
    text = page(directory, tmp_path)
    assert "</script><b>" not in text
    assert "path: &quot;&lt;/script&gt;&lt;b&gt;model&quot;" in text


# ---- few enough to draw


def test_a_long_trace_is_drawn_in_blocks_that_hold_every_span_and_the_curve_keeps_its_peak(tmp_path):
    lines = [FIRST_LINE]
    for tid, lane in (1, "compute"), (2, "memory"):
        lines.append(json.dumps({"ph": "M", "pid": 1, "tid": tid, "name": "process_name", "args": {"name": "sim:0"}}))
        lines.append(json.dumps({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}}))
    count, peak_at = 30_000, 17_777
    for i in range(count):
        lines.append(json.dumps({"ph": "X", "pid": 1, "tid": 1, "name": f"op{i % 3}", "ts": 10.0 * i, "dur": 9.0}))
        value = {"value": 10**9 if i == peak_at else i % 7}
        event = {"ph": "C", "pid": 1, "tid": 2, "name": "bytes in use", "ts": 10.0 * i, "args": value}
        lines.append(json.dumps(event))
    path = tmp_path / "trace.json"
    path.write_text(lines[0] + "\n" + ",\n".join(lines[1:]) + "\n]}\n")
    trace = Trace.read(path)
    window = Window("whole run", *trace.extent())
    blocks, grain = merged(trace.spans, trace.names, window, 1000)
    (block,) = blocks.values()
    assert len(block.begin) <= 1000 and grain > 0
    assert block.count.sum() == count
    assert block.busy.sum() == pytest.approx(count * 0.009)
    _, times, values = trace.memory()[0]
    x, y = thinned(times, values, 400)
    assert len(x) <= 400
    assert y.max() == 10**9 and x[y.argmax()] == pytest.approx(0.01 * peak_at)
    assert (x[0], x[-1]) == (times[0], times[-1])


def test_a_block_counts_nested_spans_once_and_leaves_long_ones_alone():
    begin, length = np.array([0.0, 0.1, 0.2, 5.0, 9.0]), np.array([0.4, 0.2, 0.1, 3.0, 0.5])
    other = np.full(5, -1)
    spans = Spans(begin, begin + length, np.array([0, 1, 1, 0, 1]), other, other)
    blocks = merge(spans, ["outer", "inner"], 1.0)
    assert blocks.count.tolist() == [3, 1, 1]
    assert blocks.busy.tolist() == pytest.approx([0.4, 3.0, 0.5])
    assert blocks.name == ["outer", "outer", "inner"]
    assert merge(spans, ["outer", "inner"], None).count.tolist() == [1] * 5


def test_many_steps_become_few_bars_of_the_largest_values(copy, tmp_path):
    directory = copy("offload")
    step = metrics(directory)[2]
    lines = [step | {"step": i, "late_reloads": 5 if i == 321 else 0, "loss": i / 1000} for i in range(1, 1001)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(directory, tmp_path)
    late = numbers(traces(figures(text)["link"])["late reloads"]["y"])
    assert len(late) <= over_steps.MOST_BARS
    assert sorted(late)[-2:] == [0, 5]
    assert "1,000 steps, drawn as 200 bars: of each 5 neighbours the largest value." in text
    assert numbers(traces(figures(text)["training"])["loss"]["y"]) == [line["loss"] for line in lines]


# ---- mistakes


def error_of(directory):
    done = neaptide("report", directory)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("neaptide: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert not (Path(directory) / "report.html").exists()
    return done.stderr


def cut(name, keep):
    def damage(directory):
        path = directory / name
        path.write_bytes(path.read_bytes()[:keep])

    return damage


def replace(name, text):
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "metrics.jsonl").unlink(), "has no metrics.jsonl; found: config.yaml"),
        (lambda d: (d / "config.yaml").unlink(), "has no config.yaml; found: metrics.jsonl"),
        (lambda d: (d / "trace.json").unlink(), "trace.json: missing, though log.trace is true"),
        (cut("metrics.jsonl", -10), "metrics.jsonl:3: truncated"),
        (cut("trace.json", -4), "trace.json: truncated in line"),
        (cut("trace.json", 100_000), "trace.json: truncated in line"),
        (cut("trace.json", 0), "trace.json: expected a trace of neap train; it begins with ''"),
        (cut("summary.json", -3), "summary.json: expected JSON"),
        (cut("config.yaml", 20), "config.yaml: expected the run file of neap train"),
        (replace("metrics.jsonl", "[1]\n"), "metrics.jsonl:1: expected a step of neap train; it has no step, loss"),
        (
            replace("metrics.jsonl", '{"step": 1}\n{\n'),
            "metrics.jsonl:1: expected a step of neap train; it has no loss",
        ),
        (replace("metrics.jsonl", "{\n"), "metrics.jsonl:1: expected a JSON object"),
        (replace("summary.json", "{}"), "summary.json: expected the summary of a run of neap train"),
        (replace("trace.json", '{"traceEvents": []}'), "expected a trace of neap train; it begins with"),
        (replace("trace.json", f"{FIRST_LINE}\n[]\n]}}\n"), "trace.json:2: expected an event of a trace; found '[]'"),
    ],
)
def test_a_damaged_directory_is_named(copy, damage, message):
    directory = copy("offload")
    damage(directory)
    assert message in error_of(directory)


def test_a_foreign_directory_is_named(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert "with config.yaml and metrics.jsonl" in error_of(tmp_path)
    assert "found: notes.txt" in error_of(tmp_path)
    assert "nowhere does not exist" in error_of(tmp_path / "nowhere")
    assert "notes.txt is a file" in error_of(tmp_path / "notes.txt")


def test_a_page_that_cannot_be_written_is_named(runs):
    done = neaptide("report", runs / "plain", "-o", "/proc/report.html")
    assert done.returncode == 2
    assert done.stderr.startswith("neaptide: error: /proc/report.html: cannot be written")


# ---- in a browser


def test_the_command_writes_a_page_that_needs_no_other_file(copy):
    directory = copy("offload")
    done = neaptide("report", directory)
    assert (done.returncode, done.stderr) == (0, "")
    out = directory / "report.html"
    assert done.stdout == f"{out}\n"
    html = re.sub(r"<script>.*?</script>", "", out.read_text(), flags=re.DOTALL)  # plotly's own code names addresses
    assert not re.search(r"""(src|href)=["'](?!data:|#)|@import|url\(""", html)
    assert read_run_directory(directory).name == "offload"  # its own page does not disturb it


@pytest.mark.parametrize(
    ("name", "theme"),
    [("offload", "light"), ("offload", "dark"), ("short", "light"), ("ranks", "dark"), ("cpu", "light")],
)
def test_a_browser_draws_every_figure_without_a_word_on_its_console(runs, tmp_path, name, theme):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the browser: chromium is not installed (apt-get install chromium)")
    out = report(runs / name, tmp_path / "page.html")
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=30000", "--enable-logging=stderr"]
    command += ["--dump-dom", f"file://{out}?theme={theme}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert f'data-theme="{theme}"' in done.stdout
    assert f'data-drawn="{len(figures(out.read_text()))}"' in done.stdout
