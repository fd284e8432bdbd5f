"""Models in C++ against the same models in transformers: logits, loss and every gradient, in float32.

Each error is the largest difference over the largest value of the tensor. Directories go both ways: transformers writes
what C++ reads, and reads what C++ writes.
"""

import importlib.util
import subprocess

import pytest
import torch
from build_tree import BUILD, ROOT, built
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)

RUNNER = BUILD / "tests" / "parity" / "neap_parity"
TOLERANCE = 1e-5

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
TINY = {
    "llama2": LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR_ROPE),
    "mistral": MistralConfig(**SIZES, head_dim=12, sliding_window=64),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-biased": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "qwen3-yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN_ROPE),
}
LATENT = SIZES | {
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
TINY |= {
    "deepseek": DeepseekV3Config(**LATENT),
    # As published: sharper softmax, tables as they are.
    "deepseek-yarn": DeepseekV3Config(**LATENT, rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek-yarn-tables": DeepseekV3Config(
        **LATENT | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        rope_parameters=YARN_ROPE | {"mscale": 1.4, "mscale_all_dim": 0.6, "truncate": False},
    ),
    # Queries in one step, values wider than keys, halves, one group, experts everywhere, weights without a norm.
    "deepseek-plain": DeepseekV3Config(
        **LATENT
        | {
            "q_lora_rank": None,
            "v_head_dim": 24,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        }
    ),
    "deepseek-dense": DeepseekV3Config(**LATENT | {"first_k_dense_replace": 3, "attention_bias": True}),
}


def runner():
    return built(RUNNER)


def shifted(ids):
    """The labels that transformers makes inside: the next token, and none for the last."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)


def randomised(module):
    """Random in every parameter: transformers starts biases at 0 and norms at 1, where faults would hide."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return module


def random_model(config, seed):
    set_seed(seed)
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32))


def run_cpp(model_dir, ids, labels, folder, *options):
    save_file({"ids": ids, "labels": labels}, folder / "input.safetensors")
    command = [runner(), model_dir, folder / "input.safetensors", folder / "output.safetensors", *options]
    subprocess.run([str(part) for part in command], check=True)
    return load_file(folder / "output.safetensors")


def run_transformers(model, ids, labels):
    """The loss of labels that are already shifted, from the logits that the model computes."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return logits.detach(), loss.detach()


def error_of(found, expected):
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


def compare(found, model, logits, loss, gradient_tolerance=TOLERANCE):
    """Largest error of each kind; every one within its tolerance."""
    parameters = dict(model.named_parameters())
    gradients = {name.removeprefix("grad."): value for name, value in found.items() if name.startswith("grad.")}
    errors = {name: error_of(value, parameters[name].grad) for name, value in gradients.items()}
    worst = max(errors, key=errors.get)
    report = {"logits": error_of(found["logits"], logits), "loss": error_of(found["loss"], loss)}
    print("\n  " + ", ".join(f"{name}: {value:.1e}" for name, value in report.items()), f"{worst}: {errors[worst]:.1e}")
    assert max(report.values()) <= TOLERANCE, report
    assert errors[worst] <= gradient_tolerance, (worst, errors[worst])
    return errors


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_random_model_agrees(name, tmp_path):
    model = random_model(TINY[name], seed=11)
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(0, SIZES["vocab_size"], (2, 57))
    labels = shifted(ids)
    labels[1, 7:13] = -100
    found = run_cpp(tmp_path / "model", ids, labels, tmp_path, "--save", tmp_path / "saved")
    errors = compare(found, model, *run_transformers(model, ids, labels))
    assert set(errors) == {parameter for parameter, _ in model.named_parameters()}

    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), model.buffers(), strict=True))
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["llama3", "deepseek"])
def test_a_sharded_directory_is_read(name, tmp_path):
    model = random_model(TINY[name], seed=12)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    ids = torch.randint(0, SIZES["vocab_size"], (1, 20))
    compare(
        run_cpp(tmp_path / "model", ids, shifted(ids), tmp_path), model, *run_transformers(model, ids, shifted(ids))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_widened(dtype, tmp_path):
    random_model(TINY["qwen3"], seed=13).to(dtype).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(0, SIZES["vocab_size"], (1, 20))
    compare(
        run_cpp(tmp_path / "model", ids, shifted(ids), tmp_path), model, *run_transformers(model, ids, shifted(ids))
    )


@pytest.fixture(scope="module")
def smollm2():
    script = ROOT / "tools" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fetch()


def test_smollm2_agrees_and_knows_english(smollm2, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "The capital of Germany is Berlin. The capital of Italy is Rome. The capital of France is"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")
    logits, loss = run_transformers(model, ids, shifted(ids))
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert loss < 2.0  # 3.1 with q and k left in llama.cpp's order
    options = ["--gradients", "model.layers.0.", "--gradients", "model.layers.29.", "--gradients", "model.embed_tokens"]
    found = run_cpp(smollm2, ids, shifted(ids), tmp_path, *options)
    # Rounding of float32 grows over thirty layers and back, on either side.
    compare(found, model, logits, loss, gradient_tolerance=5e-5)


def test_a_truncated_model_is_an_error_of_one_line(tmp_path):
    random_model(TINY["llama2"], seed=14).save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    done = subprocess.run([str(runner()), str(tmp_path), "none", "none"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "model.safetensors is truncated" in done.stderr
