"""Multi-token prediction against a compact reference in PyTorch: both losses and every gradient, in float32.

The reference is written from the report (arXiv 2412.19437, section 2.2) over transformers' DeepSeek-V3, which has the
decoder and its layers but none that predict further tokens. The projection takes the embedding first, as the published
weights do.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_transformers import LATENT, error_of, random_model, randomised, run_cpp
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

TOLERANCE = 1e-5
WEIGHT = 0.3


class Depth(torch.nn.Module):
    """One depth: h, Emb(next token) → h, normalised for the shared head."""

    def __init__(self, config, index):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(size, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, index)

    def forward(self, hidden, embedded, rotary, mask):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x = self.block(x, attention_mask=mask, position_embeddings=rotary)
        return self.norm(x[0] if isinstance(x, tuple) else x)

    def file_name(self, name):
        """As the published files call this parameter of the layer."""
        return {"norm.weight": "shared_head.norm.weight"}.get(name, name.removeprefix("block."))


def reference_losses(model, depths, ids, labels):
    """The model's loss and the mean of the depths', each a sum divided by the number of labels."""
    count, length = labels.numel(), ids.shape[1]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    loss = cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / count
    tokens = torch.cat([ids, labels[:, -1:]], dim=1)
    sums = []
    for k, depth in enumerate(depths, 1):
        known = length + 1 - k  # positions i whose token i + k is known
        mask = torch.full((known, known), float("-inf")).triu(1)[None, None]
        rotary = model.model.rotary_emb(hidden, torch.arange(known)[None])
        hidden = depth(hidden[:, :known], model.model.embed_tokens(tokens[:, k:]), rotary, mask)
        logits, targets = model.lm_head(hidden[:, : length - k]), labels[:, k:]
        sums.append(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return loss, sum(sums) / count / len(depths)


def stored(name, tensor):
    """Stacked experts one by one, as files have them."""
    if name.endswith("mlp.experts.gate_up_proj"):
        for expert, both in enumerate(tensor):
            gate, up = both.chunk(2)
            prefix = f"{name.removesuffix('gate_up_proj')}{expert}."
            yield prefix + "gate_proj.weight", gate.clone()
            yield prefix + "up_proj.weight", up.clone()
    elif name.endswith("mlp.experts.down_proj"):
        for expert, down in enumerate(tensor):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down.clone()
    else:
        yield name, tensor.clone()


def save(model, depths, folder):
    """A directory as DeepSeek-V3 is published: copies of embedding and head among the layers behind."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    for index, depth in enumerate(depths, model.config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for name, tensor in depth.state_dict().items():
            tensors |= dict(stored(prefix + depth.file_name(name), tensor))
        tensors[prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors[prefix + "shared_head.head.weight"] = head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": len(depths)}))
    return tensors


@pytest.mark.parametrize(("count", "tied"), [(1, False), (1, True), (3, False)])
def test_losses_and_gradients_are_those_of_the_reference(count, tied, tmp_path):
    model = random_model(DeepseekV3Config(**LATENT, tie_word_embeddings=tied), seed=5)
    depths = [randomised(Depth(model.config, model.config.num_hidden_layers + i)) for i in range(count)]
    tensors = save(model, depths, tmp_path / "model")
    tokens = torch.randint(0, LATENT["vocab_size"], (2, 30))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    options = ["--mtp-weight", WEIGHT, "--save", tmp_path / "saved"]
    found = run_cpp(tmp_path / "model", ids, labels, tmp_path, *options)

    loss, further = reference_losses(model, depths, ids, labels)
    (loss + WEIGHT * further).backward()
    errors = {"loss": error_of(found["loss"], loss.detach()), "mtp_loss": error_of(found["mtp_loss"], further.detach())}
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for index, depth in enumerate(depths, model.config.num_hidden_layers):
        for name, parameter in depth.named_parameters():
            expected[f"model.layers.{index}.{depth.file_name(name)}"] = parameter.grad
    gradients = {name.removeprefix("grad."): value for name, value in found.items() if name.startswith("grad.")}
    assert set(gradients) == set(expected)
    errors |= {name: error_of(value, expected[name]) for name, value in gradients.items()}
    worst = max(errors, key=errors.get)
    print(f"\n  loss: {errors['loss']:.1e}, mtp_loss: {errors['mtp_loss']:.1e}, {worst}: {errors[worst]:.1e}")
    assert errors[worst] <= TOLERANCE, (worst, errors[worst])

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(tensors)
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == count
