"""HyperParallel issue 664 in its full form: a DeepSeek-V3 of twelve layers on eight ranks, also under torchrun.

Layer swap on layers 0 to 10 with prefetch 1, and swapping attention alone, against sharding alone: ten steps with the
same bits. tests/issues/hyperparallel_664_sharded_test.cpp asks the same of ranks that are threads, and of every rank.
"""

import json
import re

import pytest
from neap_command import binary
from rank_processes import end, rank_processes, under_torchrun

RANKS, LAYERS, STEPS = 8, 12, 10
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 128,
}


def torchrun(workspace, name, *overrides):
    logs = workspace.path / f"{name}-logs"
    command = [binary(), "train", "run.yaml", f"--log.dir={name}", *overrides]
    result = under_torchrun(RANKS, command, workspace.path, f"--log-dir={logs}", "--redirects=3")
    errors = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert result.returncode == 0, (result.stderr, errors)
    assert errors == {str(rank): "" for rank in range(RANKS)}
    said = {path.parent.name: path.read_text() for path in logs.rglob("stdout.log")}
    return [said[str(rank)] for rank in range(RANKS)]


def processes(workspace, name, *overrides):
    command = [binary(), "train", "run.yaml", f"--log.dir={name}", *overrides]
    with rank_processes([command] * RANKS, cwd=workspace.path) as started:
        results = [end(process) for process in started]
    for code, _, err in results:
        assert (code, err) == (0, "")
    return [out for _, out, _ in results]


def train(launch, workspace, name, *overrides):
    """Trains; standard error of every rank is empty, only rank 0 speaks. Returns the summary and what it said."""
    said = launch(workspace, name, *overrides)
    assert [rank for rank, text in enumerate(said) if text] == [0]
    assert len(workspace.metrics(name)) == STEPS
    return workspace.summary(name), said[0]


@pytest.fixture
def deepseek(workspace):
    (workspace.path / "model" / "model.safetensors").unlink()
    (workspace.path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return workspace


def test_layer_swap_and_attention_swap_on_eight_ranks_have_the_bits_of_sharding_alone(deepseek):
    common = [
        "--model.init=random",
        f"--train.steps={STEPS}",
        "--train.batch=1",
        "--device.hazard_check=true",
        "--optim.lr=1e-2",
    ]
    swap = ["--offload.mode=async", "--offload.prefetch=1", "--offload.keep_last=0"]
    alone, said = train(processes, deepseek, "alone", *common)
    layers, _ = train(torchrun, deepseek, "layers", *common, *swap, "--offload.layers=[0-10]")
    attention, _ = train(
        processes, deepseek, "attention", *common, *swap, "--offload.modules=model.layers.{*}.self_attn"
    )

    assert len(alone["loss"]) == STEPS
    assert alone["loss"][-1] < alone["loss"][0]
    for swapped in (layers, attention):
        assert (swapped["loss"], swapped["grad_norm"]) == (alone["loss"], alone["grad_norm"])
        assert 0 < swapped["reloaded_bytes"] <= swapped["offloaded_bytes"]
        assert swapped["peak_bytes"] < alone["peak_bytes"]
    assert layers["offloaded_bytes"] > attention["offloaded_bytes"]
    assert alone["offloaded_bytes"] == 0

    # Each rank holds an eighth of the parameters, all of which are float32, and a little padding.
    assert f"1 × {RANKS} (replicate × shard), pieces of optim_grads_params" in said
    whole = float(re.search(r"([\d.]+) M parameters", said)[1]) * 1e6 * 4
    held = float(re.search(r"([\d.]+) KiB of parameters on each", said)[1]) * 1024
    assert whole / RANKS <= held * 1.1
    assert held < 1.4 * whole / RANKS
