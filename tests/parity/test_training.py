"""`neap train` against transformers and torch.optim.AdamW, step by step: benchmarks/smollm2_curve.py on tiny models."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from build_tree import BUILD, ROOT, built
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, set_seed

NEAP = BUILD / "cli" / "neap"
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OPTIM = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "final_ratio": 0.1}
# model, train, optim
CASES = {
    "llama-tied, cosine after a warm-up, clipped, norms without decay": (
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        {"steps": 8, "batch": 2, "sequence": 24, "accumulation": 1},
        OPTIM | {"decay": "matrices", "schedule": "cosine", "warmup": 3, "clip": 0.5},
    ),
    "qwen3, linear, accumulated, all decays": (
        Qwen3Config(**SIZES, head_dim=16),
        {"steps": 6, "batch": 1, "sequence": 24, "accumulation": 3},
        OPTIM | {"decay": "all", "schedule": "linear", "warmup": 0, "clip": 0, "betas": [0.8, 0.99], "eps": 1e-6},
    ),
}


def load_curve():
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))  # it imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("smollm2_curve", folder / "smollm2_curve.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look themselves up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


curve = load_curve()


def write_model(config, folder):
    set_seed(31)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)


def check(found, settings):
    print({what: f"{found.largest(what):.1e}" for what in ("loss", "grad_norm", "lr")}, found.evaluation)
    assert len(found.ours) == settings["train"]["steps"]
    assert found.largest("lr") <= 1e-12
    assert found.largest("loss") <= 1e-5
    assert found.largest("grad_norm") <= 1e-5
    assert found.evaluation[0] == pytest.approx(found.evaluation[1], rel=1e-5)
    assert found.ours[-1].loss < found.ours[0].loss


@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_that_of_transformers_and_the_saved_directory_goes_on(case, tmp_path):
    built(NEAP)
    config, train, optim = CASES[case]
    settings = {"train": train, "optim": optim}
    write_model(config, tmp_path / "model")
    # Something to learn: few of the tokens, and small steps between them.
    walk = np.cumsum(np.random.default_rng(3).integers(0, 3, 1200)) % 16
    tokens, held_out = walk[:1000], walk[1000:]

    def compare(model_dir, name):
        (tmp_path / name).mkdir()
        data = {"tokens": tokens, "held_out": held_out}
        return curve.compare(NEAP, model_dir, settings, **data, folder=tmp_path / name, threads=1)

    first = compare(tmp_path / "model", "first")
    check(first, settings)
    # Both go on, with a fresh optimizer, from what neap has saved.
    second = compare(first.saved, "second")
    check(second, settings)
    assert second.evaluation[0] < first.evaluation[0]
