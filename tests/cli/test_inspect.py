"""`neap inspect DIR`: numbers that can be counted by hand, of both families; and directories that no model is in."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_hyperparallel_664 import CONFIG as DEEPSEEK


def table(text):
    """{kind: (tensors, parameters, bytes as printed)}"""
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +([\d.]+ \w+) +[\d.]+ %$", text, re.MULTILINE)
    return {name: (int(tensors), int(parameters), size) for name, tensors, parameters, size in rows}


def deepseek_weights(config):
    """Zeros of every shape that the configuration asks for, in bfloat16's size; the biases in float32."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    tensors = {}

    def add(name, *shape):
        tensors[name + ".weight"] = np.zeros(shape, np.float16)

    def add_mlp(name, size):
        add(name + ".gate_proj", size, hidden)
        add(name + ".up_proj", size, hidden)
        add(name + ".down_proj", hidden, size)

    add("model.embed_tokens", config["vocab_size"], hidden)
    add("lm_head", config["vocab_size"], hidden)
    add("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        add(prefix + "input_layernorm", hidden)
        add(prefix + "post_attention_layernorm", hidden)
        attention = prefix + "self_attn."
        add(attention + "q_a_proj", query, hidden)
        add(attention + "q_a_layernorm", query)
        add(attention + "q_b_proj", heads * (nope + rope), query)
        add(attention + "kv_a_proj_with_mqa", latent + rope, hidden)
        add(attention + "kv_a_layernorm", latent)
        add(attention + "kv_b_proj", heads * (nope + value), latent)
        add(attention + "o_proj", hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            add_mlp(prefix + "mlp", config["intermediate_size"])
            continue
        add(prefix + "mlp.gate", config["n_routed_experts"], hidden)
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = np.zeros(config["n_routed_experts"], np.float32)
        add_mlp(prefix + "mlp.shared_experts", config["moe_intermediate_size"])
        for expert in range(config["n_routed_experts"]):
            add_mlp(f"{prefix}mlp.experts.{expert}", config["moe_intermediate_size"])
    return tensors


def test_a_llama(workspace):
    result = workspace.run("inspect", "model")
    assert (result.code, result.err) == (0, "")
    assert (
        "LlamaForCausalLM, hidden size 32, vocabulary 256 (head tied to the embedding), up to 128 tokens" in result.out
    )
    assert "layers      4\n" in result.out
    assert "4 heads of 8 for queries, 2 for keys and values" in result.out
    assert table(result.out) == {
        "embedding": (1, 8192, "32.00 KiB"),
        "attention": (16, 4 * 3072, "48.00 KiB"),
        "mlp": (12, 4 * 9216, "144.00 KiB"),
        "norms": (9, 9 * 32, "1.12 KiB"),
        "total": (38, 57632, "225.12 KiB"),
    }
    assert "a token meets" not in result.out


def test_a_deepseek_in_bytes_of_its_files(workspace):
    model = workspace.path / "deepseek"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEEPSEEK))
    tensors = deepseek_weights(DEEPSEEK)
    half = dict(list(tensors.items())[::2])
    rest = {name: value for name, value in tensors.items() if name not in half}
    index = {}
    for number, part in enumerate([half, rest], 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(part, model / file)
        index |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    result = workspace.run("inspect", "deepseek")
    assert (result.code, result.err) == (0, "")
    found = table(result.out)
    assert found["total"][:2] == (len(tensors), sum(value.size for value in tensors.values()))
    assert found["experts"][:2] == (9 * 8 * 3, 9 * 8 * 3 * 16 * 32)
    assert found["mlp"][:2] == (3 * 3 + 9 * 3, 3 * 3 * 64 * 32 + 9 * 3 * 16 * 32)
    assert found["router"][:2] == (18, 9 * (8 * 32 + 8))
    assert found["norms"][:2] == (1 + 12 * 4, 32 + 12 * (2 * 32 + 24 + 16))
    assert found["embedding"] == found["head"] == (1, 8192, "16.00 KiB")
    assert "12: 3 with an mlp, 9 with 8 experts, 2 for a token" in result.out
    assert f"2 files, {len(tensors) - 9} tensors of F16, 9 tensors of F32" in result.out
    assert "of which a token meets 0.1 M" in result.out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "[models] expected a readable file model/config.json"),
        (lambda model: (model / "model.safetensors").unlink(), "[models] model: expected model.safetensors or"),
        (lambda model: (model / "model.safetensors").write_bytes(b"12"), "[files] model/model.safetensors"),
        (lambda model: (model / "config.json").write_text("{}"), "[models] model/config.json: model_type ''"),
    ],
)
def test_a_directory_without_a_model(workspace, spoil, message):
    spoil(workspace.path / "model")
    result = workspace.run("inspect", "model")
    assert result.code == 2
    assert result.error_line().startswith(message)


def test_a_directory_that_is_not_there(workspace):
    assert workspace.run("inspect", "nowhere").error_line().startswith("[models] expected a model directory")
    assert workspace.run("inspect").code == 2
