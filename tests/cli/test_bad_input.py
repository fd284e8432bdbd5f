"""Every kind of bad input: one clear line, the right exit code, nothing half done."""

import importlib.metadata
import json
import subprocess

import pytest
from neap_command import CONFIG, ROOT, binary, weights
from safetensors.numpy import save_file


def run_file(workspace, old, new):
    path = workspace.path / "run.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# ---- the command line and the run file


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  steps: 3", "  stepz: 3", "[run.yaml:6] unknown key train.stepz; nearest known key: train.steps"),
        ("offload:", "ofload:", "[run.yaml:14] unknown key ofload; nearest known key: offload"),
        ("offload:", "checkpoints:", "[run.yaml:14] unknown key checkpoints; nearest known key: checkpoint"),
        ("  steps: 3", "  steps: -3", '[run.yaml:6] train.steps: expected an integer from 1 to 1000000000; found "-3"'),
        ("  lr: 1e-3", "  lr: .nan", '[run.yaml:11] optim.lr: expected a number from 0 to 1000; found ".nan"'),
        ("  type: sim", "  type: gpu", '[run.yaml:13] device.type: expected cpu, sim or cuda; found "gpu"'),
        ("  min_bytes: 0", "  min_bytes: -1", "[run.yaml:15] offload.min_bytes: expected a size from 0 to 8EiB"),
        ("  steps: 3", "  steps: 3\n  steps: 4", "[run.yaml:7] train.steps is given twice; keep one"),
        ("  steps: 3", "  steps: [3", "[run.yaml:"),
        ("  path: model\n", "", "[model.path] this key is required: the directory of the model"),
    ],
)
def test_a_bad_run_file(workspace, old, new, message):
    if "path: model" in old:
        run_file(workspace, "model:\n  path: model\n", "")
    else:
        run_file(workspace, old, new)
    assert workspace.train().error_line().startswith(message)
    assert not (workspace.path / "out").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.stepz=3", "[--train.stepz] unknown key train.stepz; nearest known key: train.steps"),
        ("--train.steps=many", "[--train.steps] train.steps: expected an integer"),
        ("--train.steps", "[--train.steps] expected a value"),
        ("--optim.warmup=4", "[optim.warmup] expected at most train.steps, which is 3; found 4"),
        ("--offload.prefetch=soon", "[--offload.prefetch] offload.prefetch: expected automatic, a number of layers"),
        ("--offload.mode=on", '[--offload.mode] offload.mode: expected off, sync or async; found "on"'),
        ("--steps=3", "unknown option --steps; nearest key of the run file: --train.steps="),
        ("extra", "unexpected argument extra"),
        ("--device.index=1", "[device.index] expected less than device.count, which is 1; found 1"),
        ("--train.tokens=0", "[--train.tokens] train.tokens: expected an integer of at least 1, or none"),
        ("--train.dtype=float16", "[--train.dtype] train.dtype: expected float32 or bfloat16"),
        ("--train.z_loss=-1", "[--train.z_loss] train.z_loss: expected a number from 0 to 1"),
        ("--train.eval_every=2", "[train.eval_every] expected data.eval beside it"),
        ("--optim.type=adam", '[--optim.type] optim.type: expected adamw or sgd; found "adam"'),
        ("--optim.momentum=0.9", "[optim.momentum] expected optim.type: sgd beside momentum"),
        ("--optim.nesterov=true", "[optim.nesterov] expected optim.momentum above 0 beside it"),
        ("--device.peak_flops=0", "[--device.peak_flops] device.peak_flops: expected a number above 0, or automatic"),
        ("--parallel.reduce_dtype=fp32", "[--parallel.reduce_dtype] parallel.reduce_dtype: expected float32 or bf"),
        ("--log.tensorboard=yes", "[--log.tensorboard] log.tensorboard: expected true or false"),
    ],
)
def test_a_bad_command_line(workspace, argument, message):
    assert workspace.train(argument).error_line().startswith(message)


def test_no_run_file(workspace):
    assert "nothing there" in workspace.run("train", "missing.yaml").error_line()
    assert "a directory" in workspace.run("train", "model").error_line()
    assert "FILE is required" in workspace.run("train").error_line()
    assert "subcommand is required" in workspace.run().error_line()


def test_help_names_every_key_and_the_exit_codes(workspace):
    result = workspace.run("train", "--help")
    assert result.code == 0
    for part in "--train.steps=integer from 1", "--offload.prefetch=", "Exit codes: 0 finished":
        assert part in result.out
    assert workspace.run("--version").out.startswith("neap ")


def test_the_page_about_run_files_is_the_one_the_schema_generates():
    page = subprocess.run([binary(), "config-doc"], capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "config.md").read_text(), "regenerate: neap config-doc > docs/config.md"


# ---- data


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.bin", None, "missing.bin: cannot be opened: No such file"),
        ("empty.bin", b"", "empty.bin: the file is empty"),
        ("odd.bin", b"\0" * 101, "odd.bin: truncated: 101 bytes are not a whole number of 2-byte tokens"),
        ("large.bin", b"\1\0" * 50 + b"\0\2" * 50, "vocabulary of 256; found 512 at position 50"),
        ("short.txt", b"too short", "short.txt holds 9 tokens; one sequence of 32 needs 33"),
    ],
)
def test_bad_data(workspace, name, content, message):
    if content is not None:
        (workspace.path / name).write_bytes(content)
    for key in "data.path", "data.eval":
        assert message in workspace.train(f"--{key}={name}").error_line()
        assert message in workspace.train(f"--{key}={name}", "--dry-run").error_line()
    assert not (workspace.path / "out").exists()


# ---- the model


def test_no_model(workspace):
    assert "nowhere" in workspace.train("--model.path=nowhere").error_line()


def test_an_unknown_architecture(workspace):
    config = CONFIG | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (workspace.path / "model" / "config.json").write_text(json.dumps(config))
    assert "mamba" in workspace.train().error_line().lower()


def test_a_broken_config(workspace):
    (workspace.path / "model" / "config.json").write_text('{"vocab_size": ')
    assert "config.json" in workspace.train().error_line()


def test_no_weights(workspace):
    (workspace.path / "model" / "model.safetensors").unlink()
    assert "safetensors" in workspace.train().error_line()
    assert not (workspace.path / "out").exists()


@pytest.mark.parametrize("size", [0, 4, 100, 100_000])
def test_truncated_weights(workspace, size):
    path = workspace.path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors" in workspace.train().error_line()


def test_missing_unexpected_misshapen_and_integer_tensors_are_listed(workspace):
    tensors = weights()
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"].astype("int32")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.surprise"] = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16]
    save_file(tensors, workspace.path / "model" / "model.safetensors")
    for arguments in [], ["--dry-run"]:
        expect_all_listed(workspace.train(*arguments))
    assert not (workspace.path / "out").exists()


def expect_all_listed(result):
    assert result.code == 2
    for fault in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "unexpected: model.layers.9.surprise",
        "misshapen: model.norm.weight",
        "not floating-point: model.layers.2.mlp.down_proj.weight is I32",
    ):
        assert fault in result.err


def test_a_sequence_beyond_the_models_positions(workspace):
    assert "[train.sequence] expected at most 128" in workspace.train("--train.sequence=129").error_line()


# ---- offload


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--offload.modules=model.layer.{*}"], ["model.layer.{*}", "model.layers"]),
        (["--offload.modules=model.layers.{*}.mpl"], ["model.layers.{*}.mpl", "mlp"]),
        (["--offload.layers=0-4"], ["0-4"]),
        (["--offload.prefetch=4"], ["prefetch", "4"]),
        (["--offload.keep_last=9"], ["keep_last", "9"]),
    ],
)
def test_units_that_do_not_exist(workspace, arguments, parts):
    line = workspace.train("--offload.mode=async", *arguments).error_line()
    for part in parts:
        assert part in line, line


# ---- recompute


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--recompute.mode=all"], ["[--recompute.mode]", "expected none, full or selective"]),
        (["--recompute.mode=selective"], ["[recompute.mode]", "recompute.modules or recompute.layers"]),
        (["--recompute.mode=full", "--recompute.layers=0"], ["[recompute.mode]", "choose selective"]),
        (["--recompute.mode=selective", "--recompute.layers=0-4"], ["[recompute.layers]", "from 0 to 3", "0-4"]),
        (["--recompute.mode=selective", "--recompute.modules=model.layers.{*}.mpl"], ["[recompute.modules]", "mlp"]),
        (["--recompute.modes=full"], ["unknown key recompute.modes", "recompute.mode"]),
    ],
)
def test_recomputation_that_cannot_be(workspace, arguments, parts):
    line = workspace.train("--device.type=cpu", *arguments).error_line()
    for part in parts:
        assert part in line, line


# ---- the device


def test_cuda_where_there_is_none(workspace):
    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("this PyTorch may find a CUDA device")
    for arguments in [], ["--dry-run"]:
        line = workspace.train("--device.type=cuda", *arguments).error_line()
        assert line.startswith("[device.type] expected cpu or sim: this PyTorch (")
        assert "was built without CUDA; found cuda" in line
    assert not (workspace.path / "out").exists()


# ---- memory


def test_a_capacity_too_small_even_with_offload(workspace):
    assert workspace.train("--offload.mode=async").code == 0
    peak = workspace.summary()["peak_bytes"]
    result = workspace.train("--offload.mode=async", f"--device.capacity={int(peak * 0.8)}")
    assert result.code == 3, result.err
    assert result.err.startswith("neap: out of memory in ")
    assert "what would lower it:" in result.err
    assert workspace.summary()["out_of_memory"] is True


def test_a_capacity_below_the_models_own_state(workspace):
    result = workspace.train("--device.capacity=64KiB")
    assert result.code == 3
    assert "out of memory in loading the model" in result.err


def test_a_bad_description_of_the_device_in_the_environment(workspace, monkeypatch):
    monkeypatch.setenv("NEAP_SIM", "capcity=1GiB")
    assert workspace.train().error_line().startswith("[NEAP_SIM] expected one of count, capacity, ")


def test_a_run_directory_that_cannot_be_made(workspace):
    assert "[log.dir]" in workspace.train("--log.dir=text.txt/inside").error_line()
