"""What a run exports, and what becomes of a checkpoint that is converted: transformers takes it as it is."""

import pytest
import torch
from neap_command import binary
from rank_processes import end, rank_processes
from transformers import AutoModelForCausalLM

CPU = ("--device.type=cpu",)


def train_ranks(workspace):
    arguments = [*CPU, "--log.dir=run", "--checkpoint.every=1", "--checkpoint.export=true"]
    with rank_processes([[binary(), "train", "run.yaml", *arguments]] * 2, cwd=workspace.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, ""), err


def test_what_is_exported_and_converted_is_what_transformers_loads(workspace):
    (workspace.path / "model" / "tokenizer.json").write_text('{"stands": "for one"}')
    train_ranks(workspace)
    converted = workspace.run("checkpoint", "convert", "run/checkpoints", "converted")
    assert (converted.code, converted.err) == (0, ""), converted.err
    assert "the model of run/checkpoints/step-00000003, step 3" in converted.out
    for name in "config.json", "tokenizer.json":
        assert (workspace.path / "converted" / name).read_text() == (workspace.path / "run/hf" / name).read_text()
    exported = AutoModelForCausalLM.from_pretrained(workspace.path / "run" / "hf")
    other = AutoModelForCausalLM.from_pretrained(workspace.path / "converted")
    begun = AutoModelForCausalLM.from_pretrained(workspace.path / "model")
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
        assert not torch.equal(tensor, begun.state_dict()[name]), name
    # And it goes on from there: the loss that neap reports is that of transformers.
    assert (
        workspace.train(*CPU, "--model.path=run/hf", "--train.steps=1", "--log.dir=next", "--data.shuffle=false").code
        == 0
    )
    ids = torch.tensor(list((workspace.path / "text.txt").read_bytes()[:65]))
    rows = torch.stack([ids[:32], ids[32:64]])
    logits = exported(rows).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:65])
    assert workspace.summary("next")["loss"][0] == pytest.approx(loss.item(), rel=1e-5)
    error = workspace.run("checkpoint", "convert", "run/checkpoints", "converted").error_line()
    assert "converted is not there yet, or an empty directory" in error
