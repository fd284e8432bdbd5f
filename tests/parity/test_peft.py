"""Adapters in C++ against PEFT's: logits, loss and every gradient, and directories that go both ways."""

import subprocess

import pytest
import torch
from build_tree import BUILD, built
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

RUNNER = BUILD / "tests" / "parity" / "neap_parity"
TOLERANCE = 1e-5
CONFIG = LlamaConfig(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
ADAPTERS = {
    "q and v": LoraConfig(r=4, lora_alpha=10, target_modules=["q_proj", "v_proj"]),
    "all, rank-stabilised": LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", use_rslora=True),
    "one layer by an expression": LoraConfig(r=2, target_modules=r".*\.1\.mlp\.(up|down)_proj"),
}


@pytest.fixture
def base(tmp_path):
    set_seed(21)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def error_of(found, expected):
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run_cpp(*arguments):
    built(RUNNER)
    return subprocess.run([str(part) for part in (RUNNER, *arguments)], check=False, capture_output=True, text=True)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft_computes_the_same_and_goes_back(name, base, tmp_path):
    set_seed(22)
    model = get_peft_model(load_base(base), ADAPTERS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                # B starts at zero, where faults would hide. With shares as large as the weights' own, and no larger:
                # what is amplified layer by layer is rounding, too.
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(0, CONFIG.vocab_size, (2, 33))
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    save_file({"ids": ids, "labels": labels}, tmp_path / "input.safetensors")
    done = run_cpp(
        base,
        tmp_path / "input.safetensors",
        tmp_path / "output.safetensors",
        *("--adapter", tmp_path / "adapter", "--save-adapter", tmp_path / "again", "--save", tmp_path / "saved"),
    )
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "output.safetensors")

    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    assert error_of(found["logits"], logits.detach()) <= TOLERANCE
    assert error_of(found["loss"], loss.detach()) <= TOLERANCE
    expected = {
        parameter_name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for parameter_name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    gradients = {key.removeprefix("grad."): value for key, value in found.items() if key.startswith("grad.")}
    assert set(gradients) == set(expected)
    for key, gradient in gradients.items():
        assert error_of(gradient, expected[key]) <= TOLERANCE, key

    again = PeftModel.from_pretrained(load_base(base), tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids, use_cache=False).logits, logits.detach())
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", base))
    assert set(saved) == set(original)
    assert all(torch.equal(saved[key], original[key]) for key in saved)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]), "modules_to_save"),
        (LoraConfig(target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 2}), "rank_pattern"),
    ],
)
def test_what_an_adapter_asks_for_beyond_that_is_refused_by_name(config, key, base, tmp_path):
    get_peft_model(load_base(base), config).save_pretrained(tmp_path / "adapter")
    done = run_cpp(base, "none", "none", "--adapter", tmp_path / "adapter")
    assert done.returncode == 1
    assert f"adapter_config.json: expected no {key}" in done.stderr
