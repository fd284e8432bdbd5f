"""`neap train` on several ranks: the numbers of one process, whatever else is on; and how all of them end."""

import re
import signal
from itertools import pairwise

import pytest
from neap_command import binary
from rank_processes import end, rank_processes, under_torchrun


def started(workspace, size, *overrides, own=None):
    """`own`: overrides of single ranks."""
    commands = [[binary(), "train", "run.yaml", *overrides, *(own or {}).get(rank, [])] for rank in range(size)]
    return rank_processes(commands, cwd=workspace.path)


def ends(processes):
    return [end(process) for process in processes]


def train(workspace, size, directory, *overrides):
    """Trains on `size` ranks; returns losses, gradient norms and what rank 0 printed."""
    with started(workspace, size, f"--log.dir={directory}", *overrides) as processes:
        results = ends(processes)
    for rank, (code, out, err) in enumerate(results):
        assert (code, err) == (0, ""), err
        assert (out == "") == (rank != 0)
    summary = workspace.summary(directory)
    assert len(workspace.metrics(directory)) == len(summary["loss"])
    return summary["loss"], summary["grad_norm"], results[0][1]


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(process.stderr.read())


CPU = ("--device.type=cpu", "--train.steps=5")


# Without clipping: the norm is the one number that depends on how gradients are cut (docs/training.md).
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_one_process_that_accumulates(workspace, size):
    common = [*CPU, "--optim.clip=0", "--optim.decay=matrices"]
    assert workspace.train(*common, "--log.dir=alone", f"--train.accumulation={size}").code == 0
    alone = workspace.summary("alone")
    loss, norm, out = train(workspace, size, "ranks", *common)
    assert loss == alone["loss"]
    assert norm == pytest.approx(alone["grad_norm"], rel=1e-6)
    assert f"{size} ranks × 1 × 2 × 32 = {size * 64} tokens" in out
    assert f"1 × {size} (replicate × shard), pieces of optim_grads_params" in out
    assert [line["tokens"] for line in workspace.metrics("ranks")] == [size * 64] * 5


def test_every_way_of_sharding_has_the_same_bits(workspace):
    plain = train(workspace, 2, "plain", *CPU)
    ways = ["stage=optim", "stage=optim_grads", "comm_fusion=false"]
    for way in ways:
        assert train(workspace, 2, way, *CPU, f"--parallel.{way}")[:2] == plain[:2], way
    # Whole copies: the norm adds up whole gradients, so nothing may depend on it.
    pieces = train(workspace, 2, "pieces", *CPU, "--optim.clip=0")
    copies = train(workspace, 2, "copies", *CPU, "--optim.clip=0", "--parallel.replicate=2")
    assert "2 × 1 (replicate × shard)" in copies[2]
    assert copies[0] == pieces[0]


def test_clipping_and_accumulation_agree_within_rounding(workspace):
    assert workspace.train(*CPU, "--log.dir=alone", "--train.accumulation=4", "--optim.clip=0.5").code == 0
    alone = workspace.summary("alone")
    loss, norm, _ = train(workspace, 2, "ranks", *CPU, "--train.accumulation=2", "--optim.clip=0.5")
    assert loss[0] == alone["loss"][0]
    assert loss == pytest.approx(alone["loss"], rel=1e-5)
    assert norm == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_a_sum_over_ranks_is_larger_by_their_number(workspace):
    mean = train(workspace, 2, "mean", *CPU, "--train.steps=1")
    total = train(workspace, 2, "sum", *CPU, "--train.steps=1", "--parallel.reduce_op=sum")
    assert total[0] == mean[0]
    assert total[1][0] == pytest.approx(2 * mean[1][0], rel=1e-6)


def test_offload_and_recomputation_on_ranks_change_no_bit(workspace):
    common = ["--device.hazard_check=true"]
    assert workspace.train(*common, "--log.dir=alone", "--train.accumulation=2").code == 0
    plain = train(workspace, 2, "plain", *common)
    assert workspace.summary("plain")["peak_bytes"] < workspace.summary("alone")["peak_bytes"]
    for name, more in {
        "offload": ["--offload.mode=async"],
        "recompute": ["--recompute.mode=full"],
        "both": ["--offload.mode=async", "--recompute.mode=full"],
    }.items():
        other = train(workspace, 2, name, *common, *more)
        assert other[:2] == plain[:2], name
        summary = workspace.summary(name)
        assert (summary["offloaded_bytes"] > 0) == (name != "recompute")
        assert summary["reruns"] == (0 if name == "offload" else 3 * 4)


def test_the_peak_is_made_of_full_parameters_and_pieces(workspace):
    train(workspace, 2, "ranks")
    plain = workspace.train("--log.dir=alone")
    assert plain.code == 0
    alone = workspace.summary("alone")["peak_parts"]
    for line in workspace.metrics("ranks"):
        parts = line["peak_parts"]
        assert sum(value for value in parts.values() if isinstance(value, int)) == line["device_peak"]
        # Half of everything, two layers that are full at most, and the embedding, which belongs to no layer.
        assert alone["parameters"] / 2 < parts["parameters"] < 1.2 * alone["parameters"]
        assert parts["optimizer"] < alone["optimizer"]
    assert workspace.summary("ranks")["peak_parts"]["activations"] > 0


def test_the_trace_has_collectives_by_unit_and_second_runs_on_the_devices_clock(workspace):
    train(workspace, 2, "out", "--log.trace=true", "--recompute.mode=full", "--train.steps=2")
    on = workspace.trace()
    device_ms = sum(line["device_step_ms"] for line in workspace.metrics())
    collectives = on("comm/world", "X")
    names = [event["name"] for event in collectives]
    layers = [f"model.layers.{layer}" for layer in range(4)]
    for layer in layers:
        assert names.count(f"reduce_scatter {layer}") == 2
        assert names.count(f"all_gather {layer}") in (3, 4), "forward and backward, but for the one that is kept"
    assert "all_gather root" in names and "reduce_scatter root" in names
    assert all(event["args"]["bytes"] > 0 for event in collectives)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(collectives))
    # One clock for all: the steps' own. Beside them, the model is loaded.
    backward = on("trainer/host", "X")
    runs = on("recompute/second runs", "X")
    assert [event["name"] for event in runs] == 2 * layers[::-1]
    end = max(event["ts"] + event["dur"] for event in backward) + device_ms * 1e3
    for event in collectives + runs + on("comm/world", "i"):
        assert 0 <= event["ts"] <= end
    assert [event["name"] for event in on("comm/world", "i")].count("all_gather losses") == 2


def torchrun(workspace, *overrides):
    return under_torchrun(2, [binary(), "train", "run.yaml", *overrides], workspace.path)


def test_torchrun_starts_the_ranks(workspace):
    result = torchrun(workspace, *CPU, "--log.trace=true")
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^step \d/5 ", result.stdout, re.MULTILINE)) == 5
    loss, norm, _ = train(workspace, 2, "direct", *CPU)
    assert (workspace.summary()["loss"], workspace.summary()["grad_norm"]) == (loss, norm)
    assert "gradient norm" in (workspace.path / "out" / "trace.json").read_text()


def test_a_mistake_under_torchrun_is_told_by_every_rank(workspace):
    result = torchrun(workspace, "--device.type=cpu", "--parallel.shard=3")
    assert result.returncode != 0
    message = "[parallel.shard] expected -1 or a divisor of the number of ranks, which is 2; found 3"
    assert f"error: {message}" in result.stderr
    assert not (workspace.path / "out").exists()


# ---- values


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--parallel.shard=0", "[parallel.shard] expected a number of ranks, or -1 for all of them; found 0"),
        ("--parallel.shard=-2", "[--parallel.shard] parallel.shard: expected an integer from -1 to 1000000"),
        ("--parallel.replicate=0", "[parallel.replicate] expected a number of copies from 1, or automatic"),
        ("--parallel.stage=zero3", "[--parallel.stage] parallel.stage: expected optim, optim_grads or optim_grads_"),
        ("--parallel.reduce_op=mean", "[--parallel.reduce_op] parallel.reduce_op: expected avg or sum"),
        ("--parallel.timeout=10us", "[parallel.timeout] expected a time of at least 1ms"),
        ("--parallel.shards=2", "[--parallel.shards] unknown key parallel.shards; nearest known key: parallel.shard"),
    ],
)
def test_a_bad_value(workspace, argument, message):
    assert workspace.train("--device.type=cpu", argument).error_line().startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--parallel.shard=3"],
            "[parallel.shard] expected -1 or a divisor of the number of ranks, which is 2; found 3",
        ),
        (["--parallel.replicate=4"], "[parallel.replicate] expected automatic or a divisor of the number of ranks"),
        (["--parallel.shard=2", "--parallel.replicate=2"], "[parallel.replicate] expected 1 for 2 ranks and parallel"),
        (["--device.type=cuda"], "[device.type] expected cpu or sim"),
        (["--data.path=nothing.bin"], ""),
    ],
)
def test_a_value_that_does_not_fit_the_ranks_is_told_by_each(workspace, arguments, message):
    with started(workspace, 2, "--device.type=cpu", *arguments) as processes:
        for rank, (code, out, err) in enumerate(ends(processes)):
            assert (code, out) == (2, ""), err
            assert err.startswith(f"neap: [rank {rank}] error: {message}"), err
            assert err.count("\n") == 1
    assert not (workspace.path / "out").exists()


def test_one_rank_alone_trains_as_ever_and_says_what_has_no_effect(workspace):
    assert workspace.train(*CPU, "--log.dir=a").code == 0
    result = workspace.train(*CPU, "--log.dir=b", "--parallel.shard=2", "--parallel.stage=optim")
    assert result.code == 0
    assert "parallel.shard has no effect: there is one rank" in result.err
    assert "parallel.stage has no effect: there is one rank" in result.err
    assert workspace.summary("a")["loss"] == workspace.summary("b")["loss"]
    with started(workspace, 1, *CPU, "--log.dir=c") as processes:  # a world of one
        assert ends(processes)[0][0] == 0
    assert workspace.summary("a")["grad_norm"] == workspace.summary("c")["grad_norm"]


def test_no_rank_ever_holds_the_whole_model(workspace):
    # 230,464 bytes of parameters. A quarter of them and of AdamW's state, which is twice as large, fit; all of them
    # would not.
    capacity = "--device.capacity=200KiB"
    for init in "pretrained", "random":
        alone = workspace.train("--dry-run", capacity, f"--model.init={init}")
        assert alone.code == 3
        assert "out of memory in loading the model" in alone.err
        with started(workspace, 4, "--dry-run", capacity, f"--model.init={init}") as processes:
            for code, _, err in ends(processes):
                assert (code, err) == (0, "")


def test_random_weights_have_the_same_bits_in_pieces(workspace):
    random = [*CPU, "--model.init=random", "--optim.clip=0"]
    assert workspace.train(*random, "--train.accumulation=2", "--log.dir=alone").code == 0
    loss, _, _ = train(workspace, 2, "ranks", *random)
    assert loss == workspace.summary("alone")["loss"]


def test_bfloat16_on_ranks_has_the_bits_of_one(workspace):
    half = [*CPU, "--train.dtype=bfloat16", "--optim.clip=0"]
    assert workspace.train(*half, "--train.accumulation=2", "--log.dir=alone").code == 0
    loss, _, out = train(workspace, 2, "ranks", *half)
    assert loss == workspace.summary("alone")["loss"]
    assert "computing in bfloat16" in out


def test_sums_of_gradients_in_float32_take_no_more_memory_than_in_bfloat16(workspace):
    half = ["--train.dtype=bfloat16", "--parallel.stage=optim", "--train.batch=1", "--train.sequence=4"]
    peaks = {}
    for dtype in "float32", "bfloat16":
        loss, _, _ = train(workspace, 2, dtype, *half, f"--parallel.reduce_dtype={dtype}")
        peaks[dtype] = workspace.summary(dtype)["peak_bytes"]
        # Those of a bfloat16 pass are bfloat16 until the ranks add them up, which they do in float32.
        assert loss == workspace.summary("float32")["loss"]
    assert peaks["float32"] <= peaks["bfloat16"]


def test_evaluation_and_sgd_on_ranks_have_the_bits_of_one(workspace):
    arguments = [*CPU, "--optim.clip=0", "--optim.type=sgd", "--optim.momentum=0.9", "--optim.lr=0.1"]
    arguments += ["--data.eval=text.txt", "--train.eval_every=2", "--train.eval_batches=7"]
    assert workspace.train(*arguments, "--train.accumulation=2", "--log.dir=alone").code == 0
    loss, _, _ = train(workspace, 2, "ranks", *arguments)
    assert loss == workspace.summary("alone")["loss"]
    evaluated = [[line["eval_loss"] for line in workspace.metrics(name)] for name in ("alone", "ranks")]
    assert evaluated[0] == evaluated[1]
    assert [value is None for value in evaluated[0]] == [True, False, True, False, False]


def test_tokens_are_those_of_all_ranks(workspace):
    run = (workspace.path / "run.yaml").read_text()
    (workspace.path / "run.yaml").write_text(run.replace("steps: 3", "tokens: 500"))
    train(workspace, 2, "ranks", "--device.type=cpu")  # steps of 128
    assert len(workspace.metrics("ranks")) == 4


def test_a_global_batch_makes_the_number_of_ranks_a_matter_of_speed(workspace):
    arguments = [*CPU, "--train.global_batch=4", "--optim.clip=0"]
    alone = workspace.train(*arguments, "--log.dir=alone")
    assert "step    2 × 2 × 32 = 128 tokens" in alone.out
    loss, _, out = train(workspace, 2, "ranks", *arguments)
    assert "step    2 ranks × 1 × 2 × 32 = 128 tokens" in out
    assert loss == workspace.summary("alone")["loss"]
    assert "  accumulation: 1\n" in (workspace.path / "ranks" / "config.yaml").read_text()
    with started(workspace, 4, *arguments) as processes:
        for code, _, err in ends(processes):
            assert code == 2
            assert "[train.global_batch] expected a multiple of 8, train.batch: 2 of 4 ranks; found 4" in err


def test_the_parallelism_block_of_mindformers(workspace):
    run = (workspace.path / "run.yaml").read_text()
    block = "parallelism:\n  data_parallel_shard: 2\n  data_parallel_shard_strategy: optim_grads\n"
    (workspace.path / "run.yaml").write_text(run + block)
    _, _, out = train(workspace, 2, "ranks", *CPU)
    assert "1 × 2 (replicate × shard), pieces of optim_grads," in out


# ---- ends


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_one(workspace, victim):
    with started(workspace, 2, "--device.type=cpu", "--train.steps=1000000") as processes:
        wait_for_step(processes[0], 2)
        processes[victim].kill()
        other = 1 - victim
        code, _, err = ends(processes)[other]
    assert code == 5, err
    assert f"neap: [rank {other}] [comm] rank {other}, " in err
    assert f"rank {victim}, which" in err, err
    if victim == 1:
        assert workspace.summary()["status"] == "rank_failed"
        assert len(workspace.metrics()) >= 2
    # The next run in the same place knows nothing of it.
    fresh = train(workspace, 2, "fresh", *CPU)
    assert train(workspace, 2, "out", *CPU)[:2] == fresh[:2]
    assert workspace.summary()["status"] == "finished"


def test_a_rank_without_memory_ends_the_other_one(workspace):
    with started(workspace, 2, "--parallel.timeout=10s", own={1: ["--device.capacity=64KiB"]}) as processes:
        (code_0, _, err_0), (code_1, _, err_1) = ends(processes)
    assert (code_0, code_1) == (5, 3), err_0 + err_1
    assert err_1.startswith("neap: [rank 1] out of memory in loading the model")
    assert "rank 1 left: out of memory in loading the model" in err_0
    assert workspace.summary()["status"] == "rank_failed"


def test_a_rank_that_runs_out_of_memory_in_backward_ends_the_other_one(workspace):
    train(workspace, 2, "unlimited")
    peak, piece = (workspace.summary("unlimited")[key] for key in ("peak_bytes", "peak_parts"))
    assert piece["piece"] == "backward"
    # Rank 0's peak is the one that is known.
    with started(workspace, 2, own={0: [f"--device.capacity={peak - 1}"]}) as processes:
        (code_0, _, err_0), (code_1, _, err_1) = ends(processes)
    assert (code_0, code_1) == (3, 5), err_0 + err_1
    assert re.match(r"neap: \[rank 0\] out of memory in the backward of step \d", err_0), err_0
    assert re.search(r"rank 0 left: out of memory in the backward of step \d", err_1), err_1
    assert re.search(r"\[comm\] rank 1, \w+ of '[\w. ]+' in group 'world'", err_1), err_1
    assert workspace.summary()["status"] == "out_of_memory"
    assert "waited" not in err_1


def test_a_mistake_of_one_rank_ends_the_other_one(workspace):
    with started(workspace, 2, "--device.type=cpu", own={1: ["--data.path=nothing.bin"]}) as processes:
        (code_0, _, err_0), (code_1, _, err_1) = ends(processes)
    assert (code_0, code_1) == (5, 2), err_0 + err_1
    assert err_1.startswith("neap: [rank 1] error: ")
    assert "rank 1 left: " in err_0


def test_ranks_that_are_told_different_things_say_which_before_the_first_step(workspace):
    own = {1: ["--train.accumulation=2", "--optim.betas=[0.8, 0.9]"], 2: ["--train.accumulation=2"]}
    with started(workspace, 3, "--device.type=cpu", own=own) as processes:
        for rank, (code, _, err) in enumerate(ends(processes)):
            assert code == 2, err
            assert err.startswith(f"neap: [rank {rank}] error: [parallel] expected every rank to be told the same")
            assert "train.accumulation is 1 on rank 0 and 2 on ranks 1, 2" in err
            assert "optim.betas is [0.8, 0.9] on rank 1 and [0.9, 0.95] on ranks 0, 2" in err
            assert "train.steps" not in err
    assert not (workspace.path / "out").exists()


@pytest.mark.parametrize("asked", [[0, 1], [1]])
def test_a_stop_signal_stops_all_ranks_at_the_same_step(workspace, asked):
    with started(workspace, 2, "--device.type=cpu", "--train.steps=1000000") as processes:
        wait_for_step(processes[0], 2)
        for rank in asked:
            processes[rank].send_signal(signal.SIGINT)
        results = ends(processes)
    for rank, (code, _, err) in enumerate(results):
        assert code == (130 if rank in asked else 143), err
    summary = workspace.summary()
    assert summary["status"] == "interrupted"
    assert len(workspace.metrics()) == len(summary["loss"]) >= 2


def test_a_loss_that_is_not_finite_stops_every_rank(workspace):
    arguments = ["--device.type=cpu", "--optim.lr=1000", "--optim.clip=0", "--train.steps=50"]
    with started(workspace, 2, *arguments) as processes:
        for rank, (code, _, err) in enumerate(ends(processes)):
            assert code == 4, err
            assert re.match(rf"neap: \[rank {rank}\] step \d+: the loss is", err)


def test_dry_run_on_ranks_writes_nothing(workspace):
    with started(workspace, 2, "--device.type=cpu", "--dry-run") as processes:
        results = ends(processes)
    assert [code for code, _, _ in results] == [0, 0]
    assert "1 × 2 (replicate × shard)" in results[0][1]
    assert results[1][1] == ""
    assert not (workspace.path / "out").exists()
