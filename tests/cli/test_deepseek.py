"""`neap train` with a DeepSeek-V3: the same bits on every device and in every combination, and experts kept busy."""

import json

import pytest
from neap_command import binary
from rank_processes import end, rank_processes
from test_hyperparallel_664 import CONFIG

LAYERS, EXPERTS, PER_TOKEN = 4, 8, 2
RANDOM = ("--model.init=random",)


@pytest.fixture
def deepseek(workspace):
    config = CONFIG | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1}
    (workspace.path / "model" / "config.json").write_text(json.dumps(config))
    return workspace


def numbers(workspace, name):
    """All that a run computed: losses, gradient norms, and which experts had how many tokens."""
    summary = workspace.summary(name)
    return summary["loss"], summary["grad_norm"], [line["expert_load"] for line in workspace.metrics(name)]


def train(workspace, name, *overrides):
    result = workspace.train(f"--log.dir={name}", *RANDOM, *overrides)
    assert (result.code, result.err) == (0, ""), result.err
    return numbers(workspace, name)


def test_every_device_and_combination_has_the_same_bits(deepseek):
    plain = train(deepseek, "cpu", "--device.type=cpu")
    hazards, away = "--device.hazard_check=true", ("--offload.mode=async", "--offload.keep_last=0")
    assert train(deepseek, "deterministic", "--device.type=cpu", "--train.deterministic=true") == plain
    assert train(deepseek, "sim", hazards) == plain
    assert train(deepseek, "offload", hazards, *away) == plain
    assert train(deepseek, "recompute", hazards, "--recompute.mode=full") == plain
    assert train(deepseek, "both", hazards, *away, "--recompute.mode=full") == plain
    experts = ["--recompute.mode=selective", "--recompute.modules=model.layers.{*}.mlp"]
    assert train(deepseek, "experts", hazards, *away, *experts) == plain
    whole = deepseek.summary("sim")["peak_bytes"]
    peaks = {name: deepseek.summary(name)["peak_bytes"] for name in ("offload", "recompute", "both", "experts")}
    assert all(peak < whole for peak in peaks.values()), (whole, peaks)
    assert deepseek.summary("both")["reruns"] == 3 * LAYERS


def test_load_is_counted_over_all_and_moves_the_biases(deepseek):
    common = ["--device.type=cpu", "--train.steps=6", "--train.accumulation=2", "--optim.clip=0"]
    moved = train(deepseek, "moved", *common, "--train.expert_bias_rate=0.02")
    for load in moved[2]:
        assert len(load) == LAYERS - 1
        assert all(len(layer) == EXPERTS and sum(layer) == 2 * 2 * 32 * PER_TOKEN for layer in load)
    still = train(deepseek, "still", *common, "--train.expert_bias_rate=0")
    assert (moved[0][0], moved[2][0]) == (still[0][0], still[2][0])
    assert moved[2][-1] != still[2][-1]

    def worst(load):
        return max(max(layer) for layer in load)

    assert worst(moved[2][-1]) < worst(still[2][-1])


def test_ranks_count_as_one_process_that_accumulates(deepseek):
    common = ["--device.type=cpu", "--train.steps=5", "--optim.clip=0", "--train.expert_bias_rate=0.02"]
    alone = train(deepseek, "alone", *common, "--train.accumulation=2")
    command = [binary(), "train", "run.yaml", "--log.dir=ranks", *RANDOM, *common, "--recompute.mode=full"]
    with rank_processes([command] * 2, cwd=deepseek.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, "")
    ranks = numbers(deepseek, "ranks")
    assert (ranks[0], ranks[2]) == (alone[0], alone[2])
    assert ranks[1] == pytest.approx(alone[1], rel=1e-6)


def test_a_rate_without_experts_is_said_to_have_no_effect(workspace):
    result = workspace.train("--device.type=cpu", "--train.expert_bias_rate=0.01")
    assert result.code == 0
    assert "train.expert_bias_rate has no effect: the model has no experts" in result.err
    assert all(line["expert_load"] is None for line in workspace.metrics())
