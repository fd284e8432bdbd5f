"""Megatron's files and adapters through the command line."""

import json
import shutil
import struct

import numpy as np
import pytest
from neaptide_command import neaptide
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers


def megatron(tokens):
    """(bin, idx) of one document."""
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", len(tokens), 0, 0, 1)
    return np.asarray(tokens, dtype="<u2").tobytes(), index


@pytest.fixture
def corpus(workspace):
    data, index = megatron(np.random.default_rng(2).integers(97, 123, 3000))
    (workspace.path / "corpus.bin").write_bytes(data)
    (workspace.path / "corpus.idx").write_bytes(index)
    return workspace


def test_a_megatron_file_trains_as_its_bare_tokens_do(corpus):
    assert corpus.train("--data.path=corpus").code == 0
    found = [step["loss"] for step in corpus.metrics()]
    assert corpus.train("--data.path=corpus.bin", "--data.format=nanogpt", "--log.dir=bare").code == 0
    assert [step["loss"] for step in corpus.metrics("bare")] == found
    assert all(step["data_wait_ms"] >= 0 for step in corpus.metrics())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: b"PK" + index[2:], "corpus.idx: expected the index of a Megatron token file"),
        (lambda index: index[:-1], "corpus.idx: truncated: the header promises 1 sequences"),
        (lambda index: index[:9] + b"\2" + index[10:], "corpus.idx: expected version 1; found 2"),
        (lambda index: index[:34] + struct.pack("<i", 2999) + index[38:], "the file ends at 6000"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error_before_the_first_step(corpus, change, message):
    path = corpus.path / "corpus.idx"
    path.write_bytes(change(path.read_bytes()))
    assert message in corpus.train("--data.path=corpus").error_line()
    assert not (corpus.path / "out").exists()


def test_an_adapter_is_trained_left_for_peft_and_gone_on_from(workspace):
    model = workspace.path / "model" / "model.safetensors"
    before = model.read_bytes()
    arguments = ["--offload.mode=async", "--recompute.mode=full", "--checkpoint.export=true"]
    result = workspace.train("--lora.rank=2", "--lora.alpha=4", *arguments)
    assert result.code == 0, result.err
    assert "[checkpoint.export] out/hf is the model alone, as it was; what was trained are the adapters" in result.err
    assert "lora    rank 2, alpha 4, 8 modules" in result.out
    assert model.read_bytes() == before
    config = json.loads((workspace.path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    tensors = load_file(workspace.path / "out" / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.3.self_attn.v_proj.lora_B.weight"].shape == (16, 2)
    assert len(tensors) == 16

    result = workspace.train("--lora.adapter=out/adapter", "--log.dir=more")
    assert result.code == 0, result.err
    more = load_file(workspace.path / "more" / "adapter" / "adapter_model.safetensors")
    assert set(more) == set(tensors)
    assert any(not np.array_equal(more[name], tensors[name]) for name in more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora.rank=4", "--lora.modules=query"], "[lora.modules] expected names of linear layers of the model: "),
        (["--lora.rank=4", "--lora.dropout=1"], "[lora.dropout] expected a probability below 1; found 1"),
        (["--lora.rank=-1"], "[--lora.rank] lora.rank: expected an integer from 0 to 65536"),
        (["--lora.rank=4", "--lora.adapter=x"], "[lora.rank] lora.adapter has a rank of its own"),
        (["--lora.adapter=nowhere"], "[lora.adapter] expected a PEFT adapter directory with adapter_config.json"),
        (["--lora.rnk=4"], "[--lora.rnk] unknown key lora.rnk; nearest known key: lora.rank"),
    ],
)
def test_adapters_that_cannot_be(workspace, arguments, message):
    assert workspace.train(*arguments).error_line().startswith(message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be opened"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "adapter_config.json: not valid JSON"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), 'expected "peft_type": "LORA"; found null'),
        (lambda path: truncate(path / "adapter_model.safetensors"), "adapter_model.safetensors is truncated"),
        (lambda path: rank_of(path / "adapter_config.json", 3), "misshapen: model.layers.0.self_attn.q_proj.lora_A"),
    ],
)
def test_a_bad_adapter(workspace, spoil, message):
    assert workspace.train("--lora.rank=2").code == 0
    spoil(workspace.path / "out" / "adapter")
    result = workspace.train("--lora.adapter=out/adapter", "--log.dir=more")
    assert result.code == 2
    assert result.err.startswith("neap: error: [") and message in result.err, result.err


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def rank_of(path, rank):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": rank}))


def test_a_resumed_run_goes_on_with_the_adapter_it_began_with(workspace):
    cpu = "--device.type=cpu"
    assert workspace.train(cpu, "--lora.rank=2", "--lora.alpha=4").code == 0
    adapter, config = workspace.path / "out" / "adapter", "adapter_config.json"
    common = [cpu, "--log.dir=run", "--checkpoint.every=2", "--checkpoint.resume=auto", "--optim.schedule=constant"]
    assert workspace.train(*common, "--lora.adapter=out/adapter", "--train.steps=2").code == 0
    for name in "moved", "louder", "other":
        shutil.copytree(adapter, workspace.path / name)
    text = (adapter / config).read_text()
    (workspace.path / "louder" / config).write_text(text.replace('"lora_alpha": 4.0', '"lora_alpha": 8.0'))
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = {name: value * 2 for name, value in tensors.items()}
    save_file(changed, workspace.path / "other" / "adapter_model.safetensors", metadata={"format": "pt"})
    for arguments, message in [
        (["--lora.adapter=louder"], "[lora.alpha] expected 4, with which run/checkpoints/step-00000002/index.json was"),
        (["--lora.adapter=other"], "[lora.adapter] expected one with checksum "),
        ([], "[lora.adapter] expected one with checksum "),
    ]:
        assert workspace.train(*common, *arguments).error_line().startswith(message)
    assert workspace.train(*common, "--lora.adapter=moved").code == 0


def test_tokenised_lines_of_json_train(workspace):
    """`neaptide tokenize`, from the tokenizer of a model directory to a run."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:255]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(workspace.path / "model" / "tokenizer.json"))
    lines = [json.dumps({"text": "some words and some more " * 10}) for _ in range(8)]
    (workspace.path / "web.jsonl").write_text("\n".join(lines))
    arguments = ["--model", "model", "--out", "web.bin", "--format", "megatron", "web.jsonl"]
    done = neaptide("tokenize", *arguments, cwd=workspace.path)
    assert done.returncode == 0, done.stderr
    assert workspace.train("--data.path=web").code == 0
