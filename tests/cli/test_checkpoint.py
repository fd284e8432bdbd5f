"""Stopping and going on: runs that are killed or stopped, other numbers of ranks, bad checkpoints, what is exported."""

import fcntl
import json
import os
import random
import shutil
import signal
import time

import pytest
from neap_command import CONFIG, Workspace, binary
from rank_processes import end, rank_processes
from safetensors.numpy import load_file

CPU = ("--device.type=cpu", "--optim.schedule=constant")
EVERY_STEP = ("--checkpoint.every=1", "--checkpoint.export=true")
RESUME = "--checkpoint.resume=auto"


def numbers(workspace, directory):
    metrics = workspace.metrics(directory)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in metrics]


def checkpoints(workspace, directory):
    return sorted(path.name for path in (workspace.path / directory / "checkpoints").iterdir())


def train(workspace, size, directory, *overrides):
    """`size` processes; one is started alone."""
    arguments = [*CPU, f"--log.dir={directory}", *overrides]
    if size == 1:
        result = workspace.train(*arguments)
        assert (result.code, result.err) == (0, ""), result.err
        return
    with rank_processes([[binary(), "train", "run.yaml", *arguments]] * size, cwd=workspace.path) as processes:
        for code, _, err in [end(process) for process in processes]:
            assert (code, err) == (0, ""), err


# ---- killed


def assert_all_are_whole(directory):
    """What has the name of a checkpoint is one."""
    for path in directory.glob("step-*"):
        for file in json.loads((path / "index.json").read_text())["content"]["files"]:
            assert (path / file["name"]).stat().st_size == file["bytes"]


def wait_for_a_step(process, delay):
    for line in process.stdout:
        if line.startswith("step ") and "loss" in line:
            break
    time.sleep(delay)


def half_saved(directory):
    try:
        return any(any(partial.iterdir()) for partial in directory.glob(".step-*.partial"))
    except FileNotFoundError:  # it has just become whole
        return False


def wait_for_a_save(process, directory):
    """Until some of a checkpoint's files are on their way."""
    while process.poll() is None and not half_saved(directory):
        time.sleep(0)


def test_killed_twenty_times_while_training_and_saving(workspace):
    steps = "--train.steps=400"
    train(workspace, 1, "whole", steps, "--checkpoint.export=true")
    chance = random.Random(20)
    directory = workspace.path / "killed" / "checkpoints"
    hits = 0
    for kill in range(20):
        process = workspace.start("train", "run.yaml", *CPU, steps, *EVERY_STEP, RESUME, "--log.dir=killed")
        try:
            if kill % 2 == 0:
                wait_for_a_step(process, chance.uniform(0, 0.01))
            else:
                wait_for_a_save(process, directory)
                time.sleep(chance.choice([0, 0.001, 0.003]))
        finally:
            process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        hits += half_saved(directory)
        assert_all_are_whole(directory)
    assert hits >= 2, "the kills have to hit saves, too"
    train(workspace, 1, "killed", steps, *EVERY_STEP, RESUME)
    assert numbers(workspace, "killed") == numbers(workspace, "whole")
    weights = [workspace.path / run / "hf" / "model.safetensors" for run in ("killed", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert checkpoints(workspace, "killed") == [f"step-{step:08}" for step in (398, 399, 400)]
    assert workspace.run("checkpoint", "verify", str(directory)).code == 0


def test_a_killed_rank_leaves_a_checkpoint_to_go_on_from(workspace):
    train(workspace, 2, "whole", "--train.steps=30")
    arguments = [*CPU, "--train.steps=30", "--log.dir=killed", "--checkpoint.every=1"]
    with rank_processes([[binary(), "train", "run.yaml", *arguments]] * 2, cwd=workspace.path) as processes:
        for line in processes[0].stdout:
            if line.startswith("step 7/"):
                break
        processes[1].kill()
        assert end(processes[0])[0] == 5
    assert_all_are_whole(workspace.path / "killed" / "checkpoints")
    train(workspace, 2, "killed", "--train.steps=30", "--checkpoint.every=1", RESUME)
    assert numbers(workspace, "killed") == numbers(workspace, "whole")


# ---- stopped


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_before_the_end(workspace, sent, code):
    arguments = (*CPU, "--train.steps=150", "--checkpoint.every=100000", "--log.dir=stopped")
    process = workspace.start("train", "run.yaml", *arguments)
    wait_for_a_step(process, 0)
    process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    done = len(workspace.metrics("stopped"))
    assert checkpoints(workspace, "stopped") == [f"step-{done:08}"]
    assert workspace.summary("stopped")["status"] == "interrupted"
    train(workspace, 1, "stopped", "--train.steps=150", "--checkpoint.every=100000", RESUME)
    train(workspace, 1, "whole", "--train.steps=150")
    assert numbers(workspace, "stopped") == numbers(workspace, "whole")
    assert len(workspace.summary("stopped")["loss"]) == 150 - done


def test_a_finished_run_has_nothing_left_to_do(workspace):
    train(workspace, 1, "run", *EVERY_STEP)
    before = numbers(workspace, "run")
    result = workspace.train(*CPU, "--log.dir=run", *EVERY_STEP, RESUME)
    assert (result.code, result.err) == (0, ""), result.err
    assert "resume  run/checkpoints/step-00000003, after step 3" in result.out
    assert numbers(workspace, "run") == before


def test_tokens_are_counted_over_steps_of_any_size(workspace):
    arguments = (*CPU, "--log.dir=run", "--checkpoint.every=1", RESUME)
    assert workspace.train(*arguments, "--train.tokens=100").code == 0  # two steps of 64
    result = workspace.train(*arguments, "--train.tokens=512", "--train.accumulation=3")
    assert result.code == 0, result.err
    assert "= 192 tokens, 4 steps" in result.out
    assert [line["tokens"] for line in workspace.metrics("run")] == [64, 64, 192, 192]
    assert "  steps: 4\n" in (workspace.path / "run" / "config.yaml").read_text()
    result = workspace.train(*arguments, "--train.tokens=512", "--train.accumulation=8")
    assert result.code == 0, result.err
    assert len(workspace.metrics("run")) == 4


def test_offload_and_recomputation_may_change_on_the_way(workspace):
    train(workspace, 1, "whole", "--train.steps=6")
    train(workspace, 1, "run", "--train.steps=2", *EVERY_STEP, "--checkpoint.asynchronous=false")
    sim = ["--device.type=sim", "--offload.mode=async", "--device.hazard_check=true"]
    train(workspace, 1, "run", "--train.steps=4", *EVERY_STEP, RESUME, *sim)
    train(workspace, 1, "run", "--train.steps=6", *EVERY_STEP, RESUME, "--recompute.mode=full")
    assert numbers(workspace, "run") == numbers(workspace, "whole")


# ---- ranks


def test_four_ranks_one_and_back_have_the_bits_of_four(workspace):
    # Without clipping, and one micro-batch on each rank: then four ranks have the bits of one that takes all four.
    common = ("--optim.clip=0", *EVERY_STEP)
    train(workspace, 4, "whole", "--train.steps=6", *common)
    train(workspace, 4, "run", "--train.steps=2", *common)
    train(workspace, 1, "run", "--train.steps=4", "--train.accumulation=4", *common, RESUME)
    train(workspace, 4, "run", "--train.steps=6", *common, RESUME, "--parallel.stage=optim")
    losses = [[loss for loss, _, _ in numbers(workspace, run)] for run in ("run", "whole")]
    assert losses[0] == losses[1]
    weights = [workspace.path / run / "hf" / "model.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_four_ranks_two_one_and_back_agree_within_rounding(workspace):
    train(workspace, 4, "whole", "--train.steps=8", *EVERY_STEP)
    for steps, size in (2, 4), (4, 2), (6, 1), (8, 4):
        accumulation = f"--train.accumulation={4 // size}"
        copies = "--parallel.replicate=2" if steps == 8 else "--parallel.comm_fusion=false"
        others = [copies] if size > 1 else []
        train(workspace, size, "run", f"--train.steps={steps}", accumulation, *EVERY_STEP, RESUME, *others)
    for ours, theirs in zip(numbers(workspace, "run"), numbers(workspace, "whole"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    run, whole = (load_file(workspace.path / name / "hf" / "model.safetensors") for name in ("run", "whole"))
    assert run.keys() == whole.keys()
    for name, tensor in run.items():
        assert abs(tensor - whole[name]).max() < 1e-4, name
    assert (
        json.loads((workspace.path / "run/checkpoints/step-00000006/index.json").read_text())["content"]["world"] == 1
    )


# ---- bad checkpoints


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    train(workspace, 2, "run", "--train.steps=2", "--checkpoint.every=1")
    return workspace


@pytest.fixture
def trained(two_steps, tmp_path):
    return two_steps.copied(tmp_path)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (damage, "rank-00001.safetensors", "is damaged: the elements "),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "rank-00001.safetensors", "it is truncated"),
        (lambda path: path.unlink(), "rank-00001.safetensors", "is missing: No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "index.json", "truncated, damaged or not the index"),
        (lambda path: path.write_text('{"a": 1}'), "index.json", "is not the index of a Neaptide checkpoint"),
    ],
    ids=["damaged", "truncated", "missing", "half an index", "foreign"],
)
def test_a_bad_checkpoint_is_an_error_on_every_rank_and_names_the_file(trained, spoil, file, message):
    path = trained.path / "run" / "checkpoints" / "step-00000002" / file
    spoil(path)
    where = f"run/checkpoints/step-00000002/{file} "
    arguments = [*CPU, "--train.steps=3", "--checkpoint.every=1", RESUME, "--log.dir=run"]
    with rank_processes([[binary(), "train", "run.yaml", *arguments]] * 2, cwd=trained.path) as processes:
        for rank, (code, _, err) in enumerate([end(process) for process in processes]):
            assert code == 2, err
            assert f"neap: [rank {rank}] error: [checkpoint] {where}" in err, err
            assert message in err
    line = trained.run("checkpoint", "verify", "run/checkpoints/step-00000002").error_line()
    assert line.startswith(f"[checkpoint] {where}") and message in line
    assert checkpoints(trained, "run") == ["step-00000001", "step-00000002"]


def test_a_checkpoint_without_an_index_is_passed_over(trained):
    (trained.path / "run/checkpoints/step-00000002/index.json").unlink()
    result = trained.train(*CPU, "--train.steps=3", RESUME, "--log.dir=run")
    assert result.code == 0
    assert "step-00000002 is passed over: it has no index.json" in result.err
    assert "resume  run/checkpoints/step-00000001, after step 1" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [RESUME, "--train.seed=2"],
            "[train.seed] expected 1, with which run/checkpoints/step-00000002/index.json was",
        ),
        ([RESUME, "--train.sequence=16"], "[train.sequence] expected 32, with which run/checkpoints/step-00000002/"),
        ([RESUME, "--optim.lr=1e-4"], "[optim.lr] expected 0.001, with which"),
        ([RESUME, "--data.path=other.txt"], "[data.path] other.txt does not hold the data that run/checkpoints/"),
        ([RESUME, "--model.path=other"], "[model.path] the model of other is not the one that run/checkpoints/"),
        ([RESUME, "--train.steps=1"], "[train.steps] expected at least 2, after which run/checkpoints/step-00000002/"),
        (["--checkpoint.resume=nowhere"], "[checkpoint] expected a checkpoint, or a directory of them, at nowhere;"),
        (["--checkpoint.resume=model"], "[checkpoint] expected a checkpoint at model; found neither index.json nor"),
        (["--checkpoint.every=1"], "[checkpoint.dir] run/checkpoints/step-00000002 is of an earlier run;"),
        (["--checkpoint.every=-1"], "[--checkpoint.every] checkpoint.every: expected an integer"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_said_before_the_first_step(trained, arguments, message):
    (trained.path / "other.txt").write_bytes(b"x" * 4000)
    shutil.copytree(trained.path / "model", trained.path / "other")
    other = CONFIG | {"rms_norm_eps": 1e-6}
    (trained.path / "other" / "config.json").write_text(json.dumps(other))
    metrics = (trained.path / "run" / "metrics.jsonl").read_text()
    result = trained.train(*CPU, "--log.dir=run", *arguments)
    assert result.code == 2, result.err
    assert result.err.startswith(f"neap: error: {message}"), result.err
    assert (trained.path / "run" / "metrics.jsonl").read_text() == metrics


def test_a_directory_that_cannot_be_written_ends_the_run(workspace):
    result = workspace.train(*CPU, "--checkpoint.every=1", "--checkpoint.dir=text.txt/inside")
    assert result.code == 2
    assert "text.txt/inside can be made" in result.err


def test_a_directory_that_another_process_writes_to_is_left_alone(workspace):
    (workspace.path / "out").mkdir()
    with (workspace.path / "out" / "run.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        result = workspace.train("--device.type=cpu")
        assert result.code == 2
        assert f"[log.dir] expected a directory that no other process writes to; found that process {os.getpid()}" in (
            result.err
        )
        assert [path.name for path in (workspace.path / "out").iterdir()] == ["run.lock"]
    assert workspace.train("--device.type=cpu").code == 0


def test_what_a_run_has_begun_to_save_is_kept_when_it_ends_in_an_error(workspace):
    process = workspace.start("train", "run.yaml", *CPU, "--train.steps=1000000", "--checkpoint.every=1")
    while not (line := process.stdout.readline()).startswith("step 3/"):
        assert line, process.stderr.read()
    (workspace.path / "text.txt").write_bytes(b"cut")
    process.stdout.read()
    assert process.wait(timeout=120) == 2
    assert "the file had 4000 bytes when it was opened" in process.stderr.read()
    kept = sorted(path.name for path in (workspace.path / "out" / "checkpoints").iterdir())
    assert kept[-1] == f"step-{len(workspace.metrics()):08}"


def test_dry_run_reads_the_checkpoint_and_writes_nothing(trained):
    files = sorted(path.relative_to(trained.path) for path in trained.path.rglob("*"))
    result = trained.train(*CPU, "--dry-run", RESUME, "--log.dir=run")
    assert (result.code, result.err) == (0, ""), result.err
    assert "resume  run/checkpoints/step-00000002, after step 2" in result.out
    assert sorted(path.relative_to(trained.path) for path in trained.path.rglob("*")) == files


# ---- for others


def test_verify_says_what_a_checkpoint_is(trained):
    result = trained.run("checkpoint", "verify", "run/checkpoints")
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("run/checkpoints/step-00000002: whole; step 2, saved by 2 ranks, ")
    assert "expected a checkpoint" in trained.run("checkpoint", "verify", "nowhere").error_line()
    assert "subcommand is required" in trained.run("checkpoint").error_line()


def test_an_export_does_not_replace_the_model_it_is_made_from(workspace):
    (workspace.path / "model").rename(workspace.path / "hf")
    line = workspace.train(*CPU, "--model.path=hf", "--log.dir=.", "--checkpoint.export=true").error_line()
    assert line.startswith("[checkpoint.export] the trained model would replace hf")
