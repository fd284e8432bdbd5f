"""Checkpoints between `neap` and nt.fully_shard() in Python."""

import sys

from build_tree import ROOT
from rank_processes import end, rank_processes

RANK = ROOT / "tests" / "python" / "shard_ranks.py"


def test_python_goes_on_from_a_checkpoint_of_neap_and_neap_reads_pythons(workspace):
    result = workspace.train("--device.type=cpu", "--checkpoint.every=3", "--checkpoint.export=true")
    assert (result.code, result.err) == (0, ""), result.err
    command = [sys.executable, str(RANK), "cpu", "from_neap"]
    with rank_processes([command] * 2, LOCAL_WORLD_SIZE=2, NEAP_RUN=workspace.path) as ranks:
        for code, out, err in [end(process) for process in ranks]:
            assert code == 0 and out.endswith("ok\n"), err
    result = workspace.run("checkpoint", "verify", "ours")
    assert result.code == 0, result.err
    assert "step-00000008" in result.out, result.out
    # A run does not go on from it, and makes no model directory of it: Python's has no configuration.
    for command in (
        ["train", "run.yaml", "--device.type=cpu", "--train.steps=9", "--checkpoint.resume=ours"],
        ["checkpoint", "convert", "ours", "hf"],
    ):
        line = workspace.run(*command).error_line()
        assert line.startswith(
            "[checkpoint] ours/step-00000008/index.json: expected 'config' in the state; found none"
        ), line
        assert not (workspace.path / "hf").exists()
