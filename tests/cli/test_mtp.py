"""Layers of a DeepSeek-V3 that predict further tokens: trained, kept as they are, or left out, and never in silence."""

import json
import math

import numpy as np
import pytest
from neap_command import binary
from rank_processes import end, rank_processes
from safetensors.numpy import load_file
from test_hyperparallel_664 import CONFIG

LAYERS = 3
FURTHER = f"model.layers.{LAYERS}."
CPU = ("--device.type=cpu",)
TRAIN = ("--model.mtp=train", "--train.mtp_weight=0.3")


@pytest.fixture
def deepseek(workspace):
    """Its model/ holds a random DeepSeek-V3 with one layer that predicts further tokens."""
    config = CONFIG | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    (workspace.path / "model" / "config.json").write_text(json.dumps(config))
    made = workspace.train(
        *CPU, "--model.init=random", "--model.mtp=load", "--train.steps=1", "--checkpoint.export=true"
    )
    assert made.code == 0, made.err
    (workspace.path / "out" / "hf").rename(workspace.path / "deepseek")
    return workspace


def train(workspace, name, *overrides, err=""):
    result = workspace.train(f"--log.dir={name}", "--model.path=deepseek", *overrides)
    assert (result.code, err in result.err) == (0, True), result.err
    assert err or not result.err, result.err
    return numbers(workspace, name)


def numbers(workspace, name):
    return [
        (line["loss"], line["mtp_loss"], line["grad_norm"], line["expert_load"]) for line in workspace.metrics(name)
    ]


def exported(workspace, name):
    return load_file(workspace.path / name / "hf" / "model.safetensors")


def test_every_device_and_combination_has_the_same_bits(deepseek):
    plain = train(deepseek, "cpu", *CPU, *TRAIN, "--optim.lr=0.01")
    assert all(math.isfinite(mtp) for _, mtp, _, _ in plain)
    assert plain[-1][1] < plain[0][1]
    assert all(len(load) == LAYERS for _, _, _, load in plain)
    common = [*TRAIN, "--optim.lr=0.01", "--device.hazard_check=true"]
    away = ("--offload.mode=async", "--offload.keep_last=0")
    assert train(deepseek, "sim", *common) == plain
    assert train(deepseek, "offload", *common, *away) == plain
    assert train(deepseek, "recompute", *common, "--recompute.mode=full") == plain
    assert train(deepseek, "both", *common, *away, "--recompute.mode=full") == plain
    assert deepseek.summary("both")["reruns"] == 3 * (LAYERS + 1)
    assert deepseek.summary("offload")["peak_bytes"] < deepseek.summary("sim")["peak_bytes"]


def test_ranks_have_the_losses_of_one_process(deepseek):
    common = ["--model.path=deepseek", *CPU, *TRAIN, "--optim.clip=0", "--train.steps=4"]
    alone = train(deepseek, "alone", *common, "--train.accumulation=2")
    command = [binary(), "train", "run.yaml", "--log.dir=ranks", *common, "--checkpoint.export=true"]
    with rank_processes([command] * 2, cwd=deepseek.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, "")
    ranks = numbers(deepseek, "ranks")
    assert [(loss, mtp, load) for loss, mtp, _, load in ranks] == [(loss, mtp, load) for loss, mtp, _, load in alone]
    tensors = exported(deepseek, "ranks")
    assert np.array_equal(tensors[FURTHER + "embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(tensors[FURTHER + "shared_head.head.weight"], tensors["lm_head.weight"])


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(deepseek):
    common = [*CPU, *TRAIN, "--checkpoint.every=2", "--checkpoint.resume=auto", "--optim.schedule=constant"]
    whole = train(deepseek, "whole", *CPU, *TRAIN, "--train.steps=4", "--optim.schedule=constant")
    train(deepseek, "broken", *common, "--train.steps=2")
    assert train(deepseek, "broken", *common, "--train.steps=4") == whole
    result = deepseek.train("--log.dir=broken", "--model.path=deepseek", *common, "--train.mtp_weight=0.1")
    assert result.error_line().startswith("[train.mtp_weight] expected 0.3, with which ")
    without = [*CPU, "--checkpoint.resume=auto", "--optim.schedule=constant", "--model.mtp=load"]
    result = deepseek.train("--log.dir=broken", "--model.path=deepseek", *without)
    assert result.error_line().startswith("[model.mtp] expected train, with which ")
    converted = deepseek.run("checkpoint", "convert", "broken/checkpoints", "converted")
    assert (converted.code, converted.err) == (0, "")
    tensors = load_file(deepseek.path / "converted" / "model.safetensors")
    assert np.array_equal(tensors[FURTHER + "shared_head.head.weight"], tensors["lm_head.weight"])
    assert json.loads((deepseek.path / "converted" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_loaded_ones_are_kept_and_change_nothing(deepseek):
    before = load_file(deepseek.path / "deepseek" / "model.safetensors")
    kept = train(deepseek, "kept", *CPU, "--model.mtp=load", "--checkpoint.export=true")
    left = train(
        deepseek, "left", *CPU, "--checkpoint.export=true", "--checkpoint.every=3", err="neither trained nor saved"
    )
    assert kept == left
    assert all(mtp is None for _, mtp, _, _ in kept)
    after = exported(deepseek, "kept")
    assert set(after) == set(before)
    for name in before:
        if "embed_tokens" in name or "shared_head.head" in name or "e_score" in name:
            continue  # shared with what is trained, or moved by the load
        assert np.array_equal(after[name], before[name]) == name.startswith(FURTHER), name
    assert not any(name.startswith(FURTHER) for name in exported(deepseek, "left"))


def test_ranks_keep_their_pieces_of_them(deepseek):
    common = ["--model.path=deepseek", *CPU, "--model.mtp=load", "--optim.clip=0"]
    alone = train(deepseek, "alone", *common, "--train.accumulation=2")
    command = [binary(), "train", "run.yaml", "--log.dir=ranks", *common, "--checkpoint.export=true"]
    with rank_processes([command] * 2, cwd=deepseek.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, "")
    assert [line[0] for line in numbers(deepseek, "ranks")] == [line[0] for line in alone]
    before = load_file(deepseek.path / "deepseek" / "model.safetensors")
    after = exported(deepseek, "ranks")
    assert set(after) == set(before)
    assert np.array_equal(after[FURTHER + "eh_proj.weight"], before[FURTHER + "eh_proj.weight"])
    # One rank leaves the line about what is left out, not each.
    command = [binary(), "train", "run.yaml", "--log.dir=left", "--model.path=deepseek", *CPU]
    with rank_processes([command] * 2, cwd=deepseek.path) as processes:
        errors = [err for _, _, err in [end(process) for process in processes]]
    assert sorted(err.count("neither trained nor saved") for err in errors) == [0, 1]


def test_what_is_left_out_is_said_wherever_it_is_lost(deepseek):
    arguments = ["--model.path=deepseek", *CPU, "--checkpoint.export=true", "--checkpoint.every=3"]
    lines = deepseek.train(*arguments, "--log.dir=left").err.splitlines()
    assert len(lines) == 2, lines
    assert "tensors of layers that predict further tokens (num_nextn_predict_layers)" in lines[0]
    assert "left/hf is without the model's 1 layer that predict" in lines[1]
    converted = deepseek.run("checkpoint", "convert", "left/checkpoints", "converted")
    assert converted.code == 0
    assert "converted is without the layers that predict further tokens" in converted.err
    assert json.loads((deepseek.path / "converted" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_mixed_precision_and_adapters(deepseek):
    assert all(math.isfinite(mtp) for _, mtp, _, _ in train(deepseek, "bf16", *CPU, *TRAIN, "--train.dtype=bfloat16"))
    train(deepseek, "lora", *CPU, *TRAIN, "--lora.rank=2", "--lora.modules=all-linear")
    adapter = load_file(deepseek.path / "lora" / "adapter" / "adapter_model.safetensors")
    assert adapter
    assert not any(FURTHER in name for name in adapter)
    named = f"--lora.modules={FURTHER}self_attn.o_proj"
    train(deepseek, "named", *CPU, *TRAIN, "--lora.rank=2", named)
    assert len(load_file(deepseek.path / "named" / "adapter" / "adapter_model.safetensors")) == 2
    result = deepseek.train("--model.path=deepseek", *CPU, "--model.mtp=load", "--lora.rank=2", named)
    assert result.error_line().startswith(
        "[lora.modules] expected adapters of layers that run; found one at " + FURTHER
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.mtp=train"], "[model.mtp] expected a DeepSeek-V3 with layers that predict further tokens"),
        (["--model.mtp=yes"], "[--model.mtp] model.mtp: expected off, load or train"),
        (["--model.mtp=train", "--train.mtp_weight=0"], "[train.mtp_weight] expected a weight above 0"),
    ],
)
def test_what_cannot_be(workspace, arguments, message):
    assert workspace.train(*arguments).error_line().startswith(message)


def test_a_weight_without_them_is_said_to_have_no_effect(workspace):
    result = workspace.train(*CPU, "--train.mtp_weight=0.5")
    assert result.code == 0
    assert "train.mtp_weight has no effect: model.mtp is not train" in result.err


def test_inspect_counts_them_apart(deepseek):
    result = deepseek.run("inspect", "deepseek")
    assert (result.code, result.err) == (0, "")
    assert "1 behind them that predict further tokens" in result.out
    assert "\nmtp " in result.out
