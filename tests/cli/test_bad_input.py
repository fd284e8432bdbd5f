"""Every kind of bad input: one clear line, the right exit code, nothing half done."""

import importlib.metadata
import json
import subprocess

import numpy as np
import pytest
from build_tree import ROOT
from neap_command import CONFIG, binary, weights
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
    ("text", "message"),
    [
        ("just text", "[bad.yaml:1] the run file: expected a section of keys; found a plain value"),
        ("\0", "[bad.yaml:1] not valid YAML: expected text; found the control character 0"),
    ],
)
def test_a_run_file_that_is_none(workspace, text, message):
    """Others: neap/train/yaml_config_test.cpp."""
    (workspace.path / "bad.yaml").write_text(text)
    assert workspace.run("train", "bad.yaml").error_line().startswith(message)


# neap/train/yaml_config_test.cpp gives every key what it does not take.
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.stepz=3", "[--train.stepz] unknown key train.stepz; nearest known key: train.steps"),
        ("--train.steps", "[--train.steps] expected a value"),
        ("--optim.warmup=4", "[optim.warmup] expected at most train.steps, which is 3; found 4"),
        ("--offload.mode=on", '[--offload.mode] offload.mode: expected off, sync or async; found "on"'),
        ("--steps=3", "unknown option --steps; nearest key of the run file: --train.steps="),
        ("extra", "unexpected argument extra"),
        ("--device.index=1", "[device.index] expected less than device.count, which is 1; found 1"),
        ("--train.eval_every=2", "[train.eval_every] expected data.eval beside it"),
        ("--train.eval_batches=2", "[train.eval_batches] expected data.eval beside it"),
        (
            "--train.tokens=9223372036854775807",
            "[train.tokens] expected at most 1000000000 steps of 64 tokens; found 9",
        ),
        ("--train.global_batch=4000000", "[train.global_batch] expected at most 1000000 times 2, train.batch: 2 of 1"),
        ("--train.global_batch=3", "[train.global_batch] expected a multiple of 2, train.batch: 2 of 1 rank; found 3"),
        ("--optim.momentum=0.9", "[optim.momentum] expected optim.type: sgd beside momentum"),
        ("--optim.nesterov=true", "[optim.nesterov] expected optim.momentum above 0 beside it"),
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


def llmc(count, tokens, magic=20240520, version=1):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes() + b"\1\0" * tokens


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt: the file is empty"),
        ("version.bin", llmc(100, 100, version=3), "found magic 20240520 version 3"),
        ("fewer.bin", llmc(101, 100), "fewer.bin: truncated: the header promises 101 tokens, the file holds 100"),
        ("more.bin", llmc(50, 100), "longer than it says: the header promises 50 tokens, the file holds 100"),
        ("negative.bin", llmc(-1, 100), "longer than it says: the header promises -1 tokens"),
        ("half.bin", llmc(100, 100)[:-1], "half.bin: truncated: 199 bytes are not a whole number of 2-byte tokens"),
        (
            "header.bin",
            llmc(0, 0)[:1000],
            "header.bin: truncated: llm.c's header alone has 1024 bytes, the file has 1000",
        ),
        ("none.bin", llmc(0, 0), "none.bin holds 0 tokens; one sequence of 32 needs 33"),
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
    assert message in workspace.train(f"--data.path={name}").error_line()
    assert message in workspace.train(f"--data.eval={name}", "--dry-run").error_line()
    assert not (workspace.path / "out").exists()


def test_a_dry_run_reads_both_kinds_of_data_and_so_does_a_run(workspace):
    message = "missing.bin: cannot be opened: No such file"
    assert message in workspace.train("--data.path=missing.bin", "--dry-run").error_line()
    assert message in workspace.train("--data.eval=missing.bin").error_line()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.path=odd.bin", "--data.token_type=uint32"], "truncated: 202 bytes are not a whole number of 4-byte"),
        (["--data.path=odd.bin", "--data.token_type=int64"], "truncated: 202 bytes are not a whole number of 8-byte"),
        (["--data.path=minus.bin", "--data.token_type=int32"], "found -1 at position 0; tokenise with the model's own"),
        (["--data.path=odd.bin", "--data.format=llmc"], "truncated: llm.c's header alone has 1024 bytes"),
        (["--data.path=text.txt", "--data.format=llmc"], "expected llm.c's header (magic 20240520 version 1, or magic"),
        (["--data.path=odd.bin", "--data.format=megatron"], "odd.idx: cannot be opened: No such file"),
        (["--data.path=model"], "model: expected a file; found something else, such as a directory"),
    ],
)
def test_data_that_is_not_of_the_format(workspace, arguments, message):
    (workspace.path / "odd.bin").write_bytes(b"\0" * 202)
    (workspace.path / "minus.bin").write_bytes(np.full(100, -1, "<i4").tobytes())
    assert message in workspace.train(*arguments).error_line()


# ---- the model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, 'hidden_size has the wrong type: "wide"'),
        ({"hidden_size": -32}, "hidden_size must be positive; found -32"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported (silu is)"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "rope_scaling.rope_type 'ntk' is not supported"),
    ],
)
def test_a_configuration_of_no_model(workspace, change, message):
    config = {key: value for key, value in (CONFIG | change).items() if value is not None}
    (workspace.path / "model" / "config.json").write_text(json.dumps(config))
    for arguments in [], ["--model.init=random"]:
        result = workspace.train(*arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("neap: error: [models] model/config.json: this model cannot be built:\n")
        assert message in result.err


def test_a_directory_without_a_configuration(workspace):
    (workspace.path / "model" / "config.json").unlink()
    assert "expected a readable file model/config.json; not found" in workspace.train().error_line()
    assert "text.txt/config.json; not found" in workspace.train("--model.path=text.txt").error_line()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": ', "model.safetensors.index.json: expected a JSON object with a weight_map"),
        ('{"x": 1}', "model.safetensors.index.json: expected a JSON object with a weight_map"),
        (
            '{"weight_map": {"model.norm.weight": "b.safetensors"}}',
            "model/b.safetensors cannot be opened: No such file",
        ),
    ],
)
def test_a_bad_index_of_shards(workspace, index, message):
    (workspace.path / "model" / "model.safetensors").unlink()
    (workspace.path / "model" / "model.safetensors.index.json").write_text(index)
    assert message in workspace.train().error_line()


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


def test_a_second_cpu(workspace):
    line = workspace.train("--device.type=cpu", "--device.index=1").error_line()
    assert line == "[device.index] expected 0, the only cpu; found 1"


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


def test_names_that_the_system_refuses_are_mistakes_and_not_bugs(workspace):
    name = "x" * 300
    for arguments, message in (
        (["train", "run.yaml", f"--log.dir={name}"], f"[log.dir] {name} cannot be made: File name too long"),
        (
            ["train", "run.yaml", f"--checkpoint.resume={name}"],
            "[checkpoint] expected a checkpoint, or a directory of",
        ),
        (
            ["train", "run.yaml", "--checkpoint.every=1", f"--checkpoint.dir={name}"],
            f"[files] expected that {name} can",
        ),
        (["checkpoint", "verify", name], "[checkpoint] expected a checkpoint, or a directory of them, at "),
        (["inspect", name], "[models] expected a model directory; not found: "),
    ):
        assert workspace.run(*arguments).error_line().startswith(message)


def test_keys_of_a_run_file_are_for_train_alone(workspace):
    line = workspace.run("inspect", "model", "--train.steps=3").error_line()
    assert line == "expected keys of a run file with neap train alone; found --train.steps"


def test_json_that_nests_without_end(workspace):
    """Whoever walks over such a value would run out of stack."""
    deep = "[" * 1_000_000 + "]" * 1_000_000
    model = workspace.path / "model"
    header = f'{{"__metadata__": {{"a": {deep}}}}}'.encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its header is not a JSON object" in workspace.run("inspect", "model").error_line()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {deep}}}')
    assert "expected a JSON object with a weight_map" in workspace.run("inspect", "model").error_line()
    (model / "config.json").write_text(json.dumps(CONFIG)[:-1] + f', "rms_norm_eps": {deep}}}')
    assert "not JSON" in workspace.run("inspect", "model").error_line()
