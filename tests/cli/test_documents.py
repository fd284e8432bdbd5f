"""Documents that share a sequence: joined, masked at their ends, or separate."""

import json

import numpy as np
import pytest
from neap_command import binary
from rank_processes import end, rank_processes

END = ord("e")
MASKED = ("--data.documents=masked", f"--data.end_token={END}")
SEPARATE = ("--data.documents=separate", f"--data.end_token={END}")


def numbers(workspace, name):
    return [(line["loss"], line["grad_norm"], line["eval_loss"]) for line in workspace.metrics(name)]


def train(workspace, name, *overrides):
    result = workspace.train(f"--log.dir={name}", "--data.eval=text.txt", *overrides)
    assert (result.code, result.err) == (0, ""), result.err
    return numbers(workspace, name)


def test_means_are_over_the_labels_that_count(workspace):
    """A model that finds all tokens about equally likely has a loss of ln 256 however many labels are left out."""
    joined = train(workspace, "joined", "--device.type=cpu")
    masked = train(workspace, "masked", "--device.type=cpu", *MASKED)
    assert masked != joined
    # One label of 26 is left out: divided by all of them the loss would be 0.2 less.
    for run in joined, masked:
        assert run[0][0] == pytest.approx(np.log(256), abs=0.1)
    assert masked[-1][2] == pytest.approx(joined[-1][2], abs=0.05)
    # The token itself is config.json's where nobody gives one.
    config = workspace.path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [END, 3]}))
    assert train(workspace, "automatic", "--device.type=cpu", MASKED[0]) == masked


@pytest.mark.parametrize("documents", [MASKED, SEPARATE])
def test_every_device_and_combination_has_the_same_bits(workspace, documents):
    plain = train(workspace, "cpu", "--device.type=cpu", *documents)
    common = [*documents, "--device.hazard_check=true"]
    away = ("--offload.mode=async", "--offload.keep_last=0")
    assert train(workspace, "sim", *common) == plain
    assert train(workspace, "offload", *common, *away) == plain
    assert train(workspace, "both", *common, *away, "--recompute.mode=full") == plain


@pytest.mark.parametrize("documents", [MASKED, SEPARATE])
def test_ranks_and_resumed_runs_count_the_same_labels(workspace, documents):
    common = ["--device.type=cpu", "--optim.clip=0", "--optim.schedule=constant", *documents]
    alone = train(workspace, "alone", *common, "--train.accumulation=2", "--train.steps=4")
    command = [binary(), "train", "run.yaml", "--log.dir=ranks", "--data.eval=text.txt", *common, "--train.steps=4"]
    with rank_processes([command] * 2, cwd=workspace.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, "")
    assert [loss for loss, _, _ in numbers(workspace, "ranks")] == [loss for loss, _, _ in alone]
    assert numbers(workspace, "ranks")[-1][2] == alone[-1][2]
    resume = [*common, "--train.accumulation=2", "--checkpoint.every=2", "--checkpoint.resume=auto"]
    train(workspace, "broken", *resume, "--train.steps=2")
    train(workspace, "broken", *resume, "--train.steps=4")
    assert [line[:2] for line in numbers(workspace, "broken")] == [line[:2] for line in alone]
    other = workspace.train("--log.dir=broken", "--data.eval=text.txt", *resume, "--data.end_token=102")
    assert other.error_line().startswith("[data.end_token] expected 101, with which ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data.documents=masked"],
            "[data.end_token] expected the token that documents end with: config.json has no",
        ),
        (["--data.documents=apart"], "[--data.documents] data.documents: expected joined, masked or separate"),
        (["--data.documents=masked", "--data.end_token=256"], "[data.end_token] expected a token below the model's"),
        (
            ["--data.documents=masked", "--data.end_token=-1"],
            "[--data.end_token] data.end_token: expected an integer of",
        ),
        (
            ["--data.documents=masked", "--data.end_token=1"],
            "[data.documents] expected documents that end with token 1;",
        ),
    ],
)
def test_documents_that_cannot_be(workspace, arguments, message):
    assert workspace.train(*arguments).error_line().startswith(message)


def test_an_end_without_documents_is_said_to_have_no_effect(workspace):
    result = workspace.train("--device.type=cpu", f"--data.end_token={END}")
    assert result.code == 0
    assert "data.end_token has no effect: data.documents is joined" in result.err
