"""What `neap train` does when the input is right."""

import re
import signal
from itertools import pairwise

import pytest
import tensorboard_events


def test_trains_on_the_cpu_and_leaves_its_files(workspace):
    result = workspace.train("--device.type=cpu")
    assert (result.code, result.err) == (0, ""), result.err
    steps = [line for line in result.out.splitlines() if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    assert "\033" not in result.out  # no terminal, no escapes
    metrics = workspace.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["tokens"] == 64 and line["tokens_per_s"] > 0 for line in metrics)
    summary = workspace.summary()
    assert summary["status"] == "finished"
    assert summary["loss"] == [line["loss"] for line in metrics]
    assert summary["loss"][2] < summary["loss"][0]
    assert summary["capacity_bytes"] is None and summary["peak_bytes"] is None
    assert not (workspace.path / "out" / "trace.json").exists()


def test_runs_repeat_to_the_last_bit_and_the_seed_matters(workspace):
    for directory, seed in ("a", 1), ("b", 1), ("c", 2):
        assert workspace.train(f"--log.dir={directory}", f"--train.seed={seed}", "--device.type=cpu").code == 0
    assert workspace.summary("a")["loss"] == workspace.summary("b")["loss"]
    assert workspace.summary("a")["grad_norm"] == workspace.summary("b")["grad_norm"]
    assert workspace.summary("a")["loss"] != workspace.summary("c")["loss"]


def test_the_configuration_it_writes_gives_the_same_run(workspace):
    assert workspace.train("--log.dir=a", "--train.accumulation=2", "--device.type=cpu").code == 0
    assert workspace.run("train", "a/config.yaml", "--log.dir=b").code == 0
    assert workspace.summary("a")["loss"] == workspace.summary("b")["loss"]


def test_offload_on_sim_lowers_the_peak_and_changes_no_bit(workspace):
    assert workspace.train("--log.dir=cpu", "--device.type=cpu").code == 0
    assert workspace.train("--log.dir=plain", "--device.hazard_check=true").code == 0
    for mode in "async", "sync":
        result = workspace.train(f"--log.dir={mode}", f"--offload.mode={mode}", "--device.hazard_check=true")
        assert (result.code, result.err) == (0, ""), result.err
        plain, offloaded = workspace.summary("plain"), workspace.summary(mode)
        assert offloaded["loss"] == plain["loss"] == workspace.summary("cpu")["loss"]
        assert offloaded["grad_norm"] == plain["grad_norm"] == workspace.summary("cpu")["grad_norm"]
        assert offloaded["peak_bytes"] < plain["peak_bytes"]
        assert offloaded["offloaded_bytes"] >= offloaded["reloaded_bytes"] > 0
        assert re.search(r"measured drop .*R = ", result.out)
        for part in "reached in", "parameters", "gradients", "optimizer state", "activations", "workspace":
            assert re.search(rf"^    {part} ", result.out, re.MULTILINE), part
        for line in workspace.metrics(mode):
            assert line["device_step_ms"] > 0
            parts = line["peak_parts"]
            assert sum(value for value in parts.values() if isinstance(value, int)) == line["device_peak"]


@pytest.mark.parametrize(
    "choice",
    [["--recompute.mode=full"], ["--recompute.mode=selective", "--recompute.modules=model.layers.{*}.mlp"]],
    ids=["full", "selective"],
)
def test_recomputation_in_any_combination_lowers_the_peak_and_changes_no_bit(workspace, choice):
    hazards = "--device.hazard_check=true"
    assert workspace.train("--log.dir=plain", hazards).code == 0
    peaks = {}
    for name, offload in ("recompute", "off"), ("both", "async"):
        result = workspace.train(f"--log.dir={name}", f"--offload.mode={offload}", hazards, *choice)
        assert (result.code, result.err) == (0, ""), result.err
        plain, other = workspace.summary("plain"), workspace.summary(name)
        assert (other["loss"], other["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        assert other["peak_bytes"] < plain["peak_bytes"]
        assert other["bytes_not_kept"] > 0
        assert other["reruns"] == 3 * 4  # steps, layers
        assert [line["reruns"] for line in workspace.metrics(name)] == [4, 4, 4]
        assert re.search(r"^ *recomputed +12 units, .* not kept in a step$", result.out, re.MULTILINE), result.out
        assert "recompute 4 units (model.layers.0" in result.out
        peaks[name] = other["peak_bytes"]
    assert peaks["both"] <= peaks["recompute"]
    assert workspace.summary("both")["offloaded_bytes"] > 0


def test_recomputation_in_debug_mode_finds_nothing_in_our_models(workspace):
    result = workspace.train("--recompute.mode=full", "--recompute.debug=true", "--device.type=cpu")
    assert (result.code, result.err) == (0, ""), result.err


def test_a_model_that_does_not_fit_is_reported_and_fits_with_offload(workspace):
    assert workspace.train("--log.dir=unlimited").code == 0
    assert workspace.train("--log.dir=low", "--offload.mode=async").code == 0
    capacity = (workspace.summary("unlimited")["peak_bytes"] + workspace.summary("low")["peak_bytes"]) // 2
    limit = f"--device.capacity={capacity}"

    short = workspace.train("--log.dir=short", limit)
    assert short.code == 3
    assert short.err.startswith("neap: out of memory in the "), short.err
    for part in "of step 1", "parameters", "optimizer state", "activations", "offload.mode: async (now off)":
        assert part in short.err
    summary = workspace.summary("short")
    assert (summary["out_of_memory"], summary["status"]) == (True, "out_of_memory")
    assert short.err.strip() == f"neap: {summary['message']}".strip()
    assert summary["capacity_bytes"] == capacity and summary["peak_bytes"] <= capacity

    fitted = workspace.train("--log.dir=fitted", limit, "--offload.mode=async")
    assert fitted.code == 0, fitted.err
    for key in "loss", "grad_norm":
        assert workspace.summary("fitted")[key] == workspace.summary("unlimited")[key]


def test_writes_a_trace_of_compute_copies_and_memory(workspace):
    result = workspace.train("--offload.mode=async", "--log.trace=true", "--device.d2h=100MB/s", "--device.h2d=100MB/s")
    assert result.code == 0, result.err
    on = workspace.trace()
    assert {"forward", "backward", "update"} <= {event["name"] for event in on("trainer/host", "X")}
    layers = [f"model.layers.{layer}" for layer in range(4)]
    assert [event["name"] for event in on("offload/forward", "X")] == 3 * layers
    assert {event["name"] for event in on("offload/bytes", "C")} == {"away", "in flight"}
    assert on("sim:0/memory", "C")
    metrics = workspace.metrics()
    for direction, key in ("out", "offloaded_bytes"), ("in", "reloaded_bytes"):
        copies = on(f"sim:0/copies {direction}", "X")
        # Others use the link, too: batches and the loss.
        assert sum(copy["args"]["bytes"] for copy in copies) >= sum(line[key] for line in metrics) > 0
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(copies))
    assert any(event["name"] == "wait" for event in on("sim:0/compute", "X"))
    assert len(on("offload/late reloads", "i")) == sum(line["late_reloads"] for line in metrics)


def test_the_environment_describes_what_the_run_file_has_no_key_for(workspace, monkeypatch):
    assert workspace.train("--log.dir=plain").code == 0
    monkeypatch.setenv("NEAP_SIM", "kernel_min=1ms,poison=on")
    assert workspace.train("--log.dir=slow").code == 0
    assert workspace.summary("slow")["loss"] == workspace.summary("plain")["loss"]
    assert workspace.summary("slow")["device_step_ms"] > 10 * workspace.summary("plain")["device_step_ms"]


def test_random_weights_need_only_the_configuration(workspace):
    (workspace.path / "model" / "model.safetensors").unlink()
    assert workspace.train("--model.init=random", "--device.type=cpu").code == 0
    assert abs(workspace.summary()["loss"][0] - 5.545) < 0.1  # ln 256


def test_reads_binary_tokens(workspace):
    tokens = bytes(workspace.path.joinpath("text.txt").read_bytes())
    (workspace.path / "tokens.bin").write_bytes(b"".join(bytes([token, 0]) for token in tokens))
    assert workspace.train("--log.dir=a", "--device.type=cpu").code == 0
    assert workspace.train("--log.dir=b", "--device.type=cpu", "--data.path=tokens.bin").code == 0
    assert workspace.summary("a")["loss"] == workspace.summary("b")["loss"]


def test_bfloat16_computes_in_it_over_float32_parameters(workspace):
    assert workspace.train("--log.dir=full", "--device.type=cpu", "--train.steps=10").code == 0
    result = workspace.train("--log.dir=half", "--device.type=cpu", "--train.steps=10", "--train.dtype=bfloat16")
    assert (result.code, result.err) == (0, ""), result.err
    assert "M parameters, float32, computing in bfloat16) on cpu" in result.out
    full, half = workspace.summary("full")["loss"], workspace.summary("half")["loss"]
    assert half != full
    assert half == pytest.approx(full, rel=2e-2)
    # Steps too small for bfloat16's eight bits add up in the masters: the loss falls as it does in float32.
    assert half[0] - half[-1] == pytest.approx(full[0] - full[-1], rel=0.1)


@pytest.mark.parametrize("offload", ["off", "async"])
def test_bfloat16_on_sim_with_offload_and_recomputation_has_the_bits_of_the_cpu(workspace, offload):
    half = "--train.dtype=bfloat16"
    assert workspace.train("--log.dir=cpu", "--device.type=cpu", half).code == 0
    result = workspace.train(
        "--log.dir=sim", half, f"--offload.mode={offload}", "--recompute.mode=full", "--device.hazard_check=true"
    )
    assert (result.code, result.err) == (0, ""), result.err
    assert workspace.summary("sim")["loss"] == workspace.summary("cpu")["loss"]
    assert workspace.summary("sim")["grad_norm"] == workspace.summary("cpu")["grad_norm"]


def test_sgd_with_momentum(workspace):
    arguments = ["--optim.type=sgd", "--optim.momentum=0.9", "--optim.nesterov=true", "--optim.lr=0.1"]
    for directory, device in ("cpu", "cpu"), ("sim", "sim"):
        result = workspace.train(f"--log.dir={directory}", f"--device.type={device}", *arguments)
        assert (result.code, result.err) == (0, ""), result.err
    loss = workspace.summary("cpu")["loss"]
    assert loss[2] < loss[0]
    assert workspace.summary("sim")["loss"] == loss
    # One running gradient for each parameter, where AdamW has two means and a count.
    parts = workspace.metrics("sim")[0]["peak_parts"]
    assert parts["optimizer"] == parts["parameters"]


def test_a_z_loss_is_added_to_the_loss(workspace):
    for directory, z_loss in ("a", 0), ("b", 1e-3):
        arguments = [f"--log.dir={directory}", f"--train.z_loss={z_loss}", "--device.type=cpu"]
        assert workspace.train(*arguments).code == 0
    # All logits are nearly 0 at first, so the logarithm of their sum is ln 256.
    added = workspace.summary("b")["loss"][0] - workspace.summary("a")["loss"][0]
    assert added == pytest.approx(1e-3 * 5.545**2, rel=0.05)


def test_evaluates_on_held_out_data_and_trains_the_same(workspace):
    (workspace.path / "held-out.txt").write_bytes((workspace.path / "text.txt").read_bytes()[:1000])
    assert workspace.train("--log.dir=plain", "--device.type=cpu", "--train.steps=5").code == 0
    result = workspace.train(
        "--log.dir=eval", "--device.type=cpu", "--train.steps=5", "--train.eval_every=2", "--data.eval=held-out.txt"
    )
    assert (result.code, result.err) == (0, ""), result.err
    losses = [line["eval_loss"] for line in workspace.metrics("eval")]
    assert [loss is None for loss in losses] == [True, False, True, False, False]
    assert losses[4] < losses[1]
    assert workspace.summary("eval")["eval_loss"] == losses[4]
    assert workspace.summary("eval")["loss"] == workspace.summary("plain")["loss"]
    assert f"eval_loss {losses[4]:.4f}" in result.out
    assert workspace.metrics("eval")[1]["eval_ms"] > 0


def test_evaluation_with_offload_and_recomputation_measures_the_same(workspace):
    evaluation = ["--data.eval=text.txt", "--train.eval_batches=3", "--device.hazard_check=true"]
    assert workspace.train("--log.dir=a", *evaluation).code == 0
    result = workspace.train("--log.dir=b", "--offload.mode=async", "--recompute.mode=full", *evaluation)
    assert (result.code, result.err) == (0, ""), result.err
    assert workspace.summary("a")["eval_loss"] == workspace.summary("b")["eval_loss"] is not None


def test_the_length_of_a_run_in_tokens(workspace):
    (workspace.path / "run.yaml").write_text(
        (workspace.path / "run.yaml").read_text().replace("steps: 3", "tokens: 200")
    )
    result = workspace.train("--device.type=cpu")
    assert result.code == 0, result.err
    assert "64 tokens, 4 steps" in result.out
    assert len(workspace.metrics()) == 4
    config = (workspace.path / "out" / "config.yaml").read_text()
    assert "  steps: 4\n" in config and "  tokens: none\n" in config


def test_utilisation_is_told_where_the_peak_is_known(workspace):
    assert workspace.train("--log.dir=cpu", "--device.type=cpu").code == 0
    assert all(line["mfu"] is None for line in workspace.metrics("cpu"))
    result = workspace.train("--log.dir=told", "--device.type=cpu", "--device.peak_flops=1e9")
    for line in workspace.metrics("told"):
        layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96
        flops = line["tokens"] * (6 * (4 * layer + 32 * 256) + 12 * 4 * 32 * 32)
        assert line["mfu"] == pytest.approx(flops / (line["step_ms"] * 1e-3) / 1e9)
    assert re.search(r"tok/s .* mfu \d+\.\d%", result.out)
    assert workspace.train("--log.dir=sim").code == 0
    for line in workspace.metrics("sim"):
        assert 0 < line["mfu"] < 1  # of what sim says that it can do


def test_writes_events_that_tensorboard_reads(workspace):
    arguments = ["--log.tensorboard=true", "--data.eval=text.txt"]
    assert workspace.train(*arguments).code == 0
    assert workspace.train(*arguments).code == 0  # replaces what the first run left
    (path,) = (workspace.path / "out").glob("events.out.tfevents.*")
    events = tensorboard_events.read_scalars(path)
    for name in "loss", "grad_norm", "lr", "tokens_per_s", "device_peak", "mfu", "eval_loss":
        values = [(line["step"], line[name]) for line in workspace.metrics() if line[name] is not None]
        assert [step for step, _ in events[name]] == [step for step, _ in values]
        assert [value for _, value in events[name]] == pytest.approx([value for _, value in values], rel=1e-6)


def test_dry_run_checks_everything_and_writes_nothing(workspace):
    result = workspace.train("--dry-run", "--train.steps=20", "--offload.mode=async")
    assert (result.code, result.err) == (0, "")
    assert "  steps: 20\n" in result.out
    assert "4 units (model.layers.0 … model.layers.3)" in result.out
    assert not (workspace.path / "out").exists()


def test_an_override_takes_its_value_with_or_without_an_equals_sign_and_the_last_one_wins(workspace):
    result = workspace.train("--train.steps=9", "--train.steps", "2", "--device.type", "cpu")
    assert result.code == 0, result.err
    assert len(workspace.metrics()) == 2


def test_a_key_without_effect_is_mentioned(workspace):
    result = workspace.train(
        "--device.type=cpu",
        "--device.capacity=1GiB",
        "--offload.modules=model.layers.{*}",
        "--recompute.layers=0",
    )
    assert result.code == 0
    assert "device.capacity has no effect: device.type is not sim" in result.err
    assert "offload.modules and offload.layers have no effect: offload.mode is off" in result.err
    assert "recompute.modules and recompute.layers have no effect: recompute.mode is none" in result.err
    given = ["--lora.alpha=4", "--recompute.debug=true", "--checkpoint.keep_last=1", "--device.hazard_check=true"]
    result = workspace.train("--device.type=cpu", "--optim.type=sgd", "--optim.eps=1e-6", *given, "--dry-run")
    assert result.code == 0
    for key, why in (
        ("lora.alpha", "lora.rank is 0: the whole model is trained, without adapters"),
        ("recompute.debug", "recompute.mode is none"),
        ("checkpoint.keep_last", "checkpoint.every is 0"),
        ("device.hazard_check", "device.type is not sim"),
        ("optim.eps", "optim.type is sgd"),
    ):
        assert f"{key} has no effect: {why}\n" in result.err
    assert result.err.count("has no effect") == 5
    result = workspace.train("--device.type=cpu", "--offload.mode=async")
    assert result.code == 0
    assert "offload.mode: async saves no memory: device.type is cpu" in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_finishes_the_step_and_writes_everything(workspace, number):
    process = workspace.start("train", "run.yaml", "--train.steps=1000000", "--device.type=cpu")
    lines = []
    while not (lines and lines[-1].startswith("step 2/")):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    process.send_signal(number)
    out, err = process.stdout.read(), process.stderr.read()  # communicate() would lose lines that are read ahead
    assert process.wait(timeout=120) == 128 + number
    assert "stopping after this step" in err
    metrics, summary = workspace.metrics(), workspace.summary()
    printed = [line for line in "".join([*lines, out]).splitlines() if re.match(r"step \d+/", line)]
    assert len(printed) == len(metrics) == len(summary["loss"]) >= 2
    assert summary["status"] == "interrupted"


def test_a_loss_that_is_not_finite_stops_the_run(workspace):
    result = workspace.train("--device.type=cpu", "--optim.lr=1000", "--optim.clip=0", "--train.steps=50")
    if result.code == 0:
        pytest.fail("a learning rate of 1000 stayed finite for 50 steps; the test needs another way to overflow")
    assert result.code == 4
    assert re.match(r"neap: step \d+: the loss is \S+ and the gradient norm \S+; the update was not made", result.err)
    assert workspace.summary()["status"] == "non_finite"


def test_updates_that_are_not_finite_can_be_skipped(workspace):
    arguments = ["--optim.lr=1000", "--optim.clip=0", "--train.steps=50", "--train.non_finite=skip"]
    result = workspace.train("--device.type=cpu", *arguments)
    assert result.code == 0, result.err
    skipped = [line["skipped"] for line in workspace.metrics()]
    assert len(skipped) == 50
    assert not skipped[0] and skipped[-1]
    assert workspace.summary()["status"] == "finished"


@pytest.mark.parametrize("choice", ["true", "warn"])
def test_deterministic_operators_have_the_same_bits_here(workspace, choice):
    for device in "cpu", "sim":
        for directory, value in ("plain", "false"), ("a", choice), ("b", choice):
            arguments = [f"--log.dir={directory}", f"--device.type={device}", f"--train.deterministic={value}"]
            offload = ["--offload.mode=async", "--device.hazard_check=true"] if device == "sim" else []
            result = workspace.train(*arguments, *offload)
            assert (result.code, result.err) == (0, ""), result.err
            assert ("deterministic operators" in result.out) == (value != "false")
        for key in "loss", "grad_norm":
            assert workspace.summary("plain")[key] == workspace.summary("a")[key] == workspace.summary("b")[key]
    assert f"  deterministic: {choice}\n" in (workspace.path / "a" / "config.yaml").read_text()
