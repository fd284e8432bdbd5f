"""Small models, and training steps of them to compare bit by bit."""

import contextlib
from dataclasses import dataclass, field

import torch


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    return _model(LlamaForCausalLM, LlamaConfig, head_dim=16, **changes)


def qwen3(**changes):
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    return _model(Qwen3ForCausalLM, Qwen3Config, head_dim=16, **changes)


def deepseek_v3(**changes):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # noqa: PLC0415

    experts = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    return _model(DeepseekV3ForCausalLM, DeepseekV3Config, **experts, **changes)


def lora(**changes):
    """A Llama with adapters that already do something, over weights that are frozen."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    options = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "init_lora_weights": False}
    model = llama()
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, **(options | changes)))


def _model(cls, config, **changes):
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if "moe_intermediate_size" not in changes else 4,
        "max_position_embeddings": 64,
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return cls(config(**(sizes | changes))).train()


class Chain(torch.nn.Module):
    """Layers x → tanh(x · w): each saves what comes in and what goes out; what goes out of one comes into the next."""

    def __init__(self, layers=4, side=32):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Linear(side) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Linear(torch.nn.Module):
    def __init__(self, side):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(side, side) * 0.2)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


@dataclass
class Run:
    """What steps of training leave: losses, and the gradients of every step."""

    losses: list = field(default_factory=list)
    gradients: list = field(default_factory=list)

    def assert_same(self, other):
        assert len(self.gradients) == len(other.gradients)
        for ours, theirs in zip(self.losses + self.gradients, other.losses + other.gradients, strict=True):
            if isinstance(ours, dict):
                assert ours.keys() == theirs.keys()
                different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
                assert not different, f"{len(different)} of {len(ours)} gradients differ: {different[:4]}"
            else:
                assert torch.equal(ours, theirs)


def tokens(device, step=0, batch=2, length=32, vocabulary=128):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)


def language_loss(model, device, step):
    batch = tokens(device, step)
    return model(input_ids=batch, labels=batch).loss


def chain_loss(model, device, step):
    generator = torch.Generator().manual_seed(200 + step)
    return model(torch.randn(32, 32, generator=generator).to(device)).square().mean()


def train(model, device, *, loss=language_loss, steps=3, micro_batches=1, around=contextlib.nullcontext, backward=None):
    """Steps of AdamW. `around` makes a context for each forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run()
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(micro_batches):
            with around():
                value = loss(model, device, step * micro_batches + micro)
            (backward or torch.Tensor.backward)(value)
            run.losses.append(value.detach().cpu())
        run.gradients.append({n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return run
