"""The examples, command by command as their pages say, on a tiny model in the place of SmolLM2-135M.

examples/own_model is built against the installed package by tests/install.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from build_tree import BUILD, ROOT, built
from rank_processes import environment
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

NEAP = BUILD / "cli" / "neap"
MODEL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def commands_of(page):
    """What its console blocks type after the prompt."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture
def repository(tmp_path):
    """A folder where the examples find what they expect at the top of the repository."""
    built(NEAP)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    set_seed(5)
    LlamaForCausalLM(MODEL).save_pretrained(tmp_path / "models" / "smollm2-135m")
    (tmp_path / "data").mkdir()
    walk = np.cumsum(np.random.default_rng(6).integers(0, 3, 60_000)) % MODEL.vocab_size
    (tmp_path / "data" / "quickstart.bin").write_bytes(walk.astype("<u2").tobytes())
    return tmp_path


def run_page(repository, name):
    path = os.pathsep.join([str(NEAP.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands_of(repository / "examples" / name / "README.md"):
        done = subprocess.run(
            command,
            shell=True,
            cwd=repository,
            env=environment(PATH=path),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_learns(steps):
    assert np.mean([s["loss"] for s in steps[-5:]]) < np.mean([s["loss"] for s in steps[:5]])


def test_every_example_is_on_the_page_and_short():
    folders = [path for path in (ROOT / "examples").iterdir() if path.is_dir()]
    page = (ROOT / "examples" / "README.md").read_text()
    for folder in folders:
        assert f"({folder.name}/README.md)" in page
        for file in folder.iterdir():
            assert len(file.read_text().splitlines()) < 80, file


def test_finetune(repository):
    run_page(repository, "finetune")
    runs = repository / "runs"
    steps = metrics(runs / "finetune")
    assert len(steps) == 50
    assert_learns(steps)
    assert steps[49]["eval_loss"] < steps[24]["eval_loss"]
    # The second run begins where the first one ended.
    assert metrics(runs / "more")[0]["loss"] < steps[0]["loss"]


def test_more_ranks(repository):
    run_page(repository, "more_ranks")
    run = repository / "runs" / "more_ranks"
    steps = metrics(run)
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert {step["tokens"] for step in steps} == {4 * 256}
    assert_learns(steps)
    worlds = [
        json.loads((run / "checkpoints" / f"step-{step:08}" / "index.json").read_text())["content"]["world"]
        for step in (10, 20, 30)
    ]
    assert worlds == [1, 2, 4]
    # One process, all the way: the same sequences and, within rounding, the same losses.
    command = [NEAP, "train", "examples/more_ranks/run.yaml", "--log.dir=runs/alone"]
    subprocess.run(command, cwd=repository, env=environment(), check=True, capture_output=True)
    alone = [step["loss"] for step in metrics(repository / "runs" / "alone")]
    assert [step["loss"] for step in steps] == pytest.approx(alone, rel=1e-5)
    after_20, end = (load_file(run / name / "model.safetensors") for name in ("after-20", "hf"))
    assert after_20.keys() == end.keys()


def test_lora(repository):
    run_page(repository, "lora")
    runs = repository / "runs"
    assert_learns(metrics(runs / "lora"))
    assert metrics(runs / "lora-more")[0]["loss"] < metrics(runs / "lora")[0]["loss"]
    model, merged = (
        load_file(folder / "model.safetensors") for folder in (repository / "models/smollm2-135m", runs / "lora-merged")
    )
    changed = {name for name in model if not np.array_equal(model[name], merged[name])}
    assert changed == {name for name in model if "_proj." in name}


@pytest.mark.parametrize("name", ["fsdp2", "accelerate"])
def test_ranks_of_torch(repository, name):
    run_page(repository, name)
    tokens = np.fromfile(repository / "data" / "quickstart.bin", "<u2")[:2048].astype(np.int64)
    batch = torch.from_numpy(tokens.reshape(-1, 128))
    with torch.no_grad():
        before, after = (
            LlamaForCausalLM.from_pretrained(repository / folder)(input_ids=batch, labels=batch).loss
            for folder in ("models/smollm2-135m", f"runs/{name}")
        )
    assert after < 0.9 * before


def test_accelerates_plugin_is_refused_where_accelerate_would_leave_it_out(repository):
    command = [sys.executable, "examples/accelerate/train.py", "--fsdp", "models/none", "data/none.bin", "runs/none"]
    done = subprocess.run(command, cwd=repository, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--fsdp: expected ranks on accelerators on which accelerate has FSDP")
    assert "found 1 on cpu" in done.stderr
