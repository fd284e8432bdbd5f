"""The `neap` command under test, and a folder with a tiny model, its data and a run file."""

import copy
import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from build_tree import BUILD
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

RUN_FILE = """\
model:
  path: model
data:
  path: text.txt
train:
  steps: 3
  batch: 2
  sequence: 32
  seed: 1
optim:
  lr: 1e-3
device:
  type: sim
offload:
  min_bytes: 0
  prefetch: 1
  max_in_flight: 0
log:
  dir: out
"""


def binary():
    if "NEAP_BIN" in os.environ:
        return Path(os.environ["NEAP_BIN"])
    return BUILD / "cli" / "neap"


def weights():
    """A tiny random Llama, named as Hugging Face names it."""
    random = np.random.default_rng(0)
    hidden, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    kv = CONFIG["num_key_value_heads"] * heads

    def matrix(*shape):
        return random.normal(0, 0.02, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = np.ones(hidden, np.float32)
        tensors[prefix + "post_attention_layernorm.weight"] = np.ones(hidden, np.float32)
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(hidden, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = matrix(kv, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = matrix(kv, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, hidden)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    return tensors


@dataclass
class Result:
    code: int
    out: str
    err: str

    def error_line(self):
        """The one line of a user's mistake; anything more would be noise."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert self.code == 2, (self.code, self.err)
        assert lines[0].startswith("neap: error: "), lines[0]
        return lines[0].removeprefix("neap: error: ")


class Workspace:
    def __init__(self, path):
        self.path = path
        (path / "model").mkdir()
        (path / "model" / "config.json").write_text(json.dumps(CONFIG))
        save_file(weights(), path / "model" / "model.safetensors", metadata={"format": "pt"})
        text = np.random.default_rng(1).integers(97, 123, 4000, dtype=np.uint8)
        (path / "text.txt").write_bytes(text.tobytes())
        (path / "run.yaml").write_text(RUN_FILE)

    def copied(self, path):
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        other = copy.copy(self)
        other.path = path
        return other

    def start(self, *arguments):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [str(binary()), *arguments]
        return subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *arguments):
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        return Result(process.returncode, out, err)

    def train(self, *overrides):
        return self.run("train", "run.yaml", *overrides)

    def summary(self, directory="out"):
        return json.loads((self.path / directory / "summary.json").read_text())

    def trace(self, directory="out"):
        """A function: (track, phase) → the trace's events there."""
        events = json.loads((self.path / directory / "trace.json").read_text())["traceEvents"]
        groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}

        def on(track, phase):
            return [
                event
                for event in events
                if event["ph"] == phase and f"{groups[event['pid']]}/{lanes[event['tid']]}" == track
            ]

        return on

    def metrics(self, directory="out"):
        return [json.loads(line) for line in (self.path / directory / "metrics.jsonl").read_text().splitlines()]
