"""Run files with the blocks of MindFormers and VeOmni: they train, and every wrong use is one line and exit code 2."""

import pytest

OWN = """\
model:
  path: model
data:
  path: text.txt
train:
  steps: 3
  batch: 2
  sequence: 32
  seed: 1
device:
  type: sim
"""

SWAP = """\
swap:
  enable: True
  default_prefetch: 1
  layer_swap:
    - layers: ['0-1']
    - layers: ['2']
"""


EVERYTHING_LEAVES = ["--offload.min_bytes=0", "--offload.keep_last=0", "--offload.max_in_flight=0"]


def write(workspace, text, name="run.yaml"):
    (workspace.path / name).write_text(text)


def train(workspace, text, directory):
    write(workspace, text)
    result = workspace.train(f"--log.dir={directory}", *EVERYTHING_LEAVES)
    assert (result.code, result.err) == (0, ""), result.err
    return result, workspace.summary(directory)


def test_swap_and_recompute_of_mindformers_change_no_bit_and_lower_the_peak(workspace):
    _, plain = train(workspace, OWN, "plain")
    result, swap = train(workspace, OWN + SWAP, "swap")
    assert "offload async, 3 units (model.layers.0 … model.layers.2), prefetch 1" in result.out
    recompute = "recompute:\n  mode: select\n  select_module:\n    attention: ['1']\n    mlp: ['0-3']\n"
    result, both = train(workspace, OWN + SWAP + recompute, "both")
    assert "recompute 5 units" in result.out
    for run in swap, both:
        assert (run["loss"], run["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        assert run["peak_bytes"] < plain["peak_bytes"]
        assert run["offloaded_bytes"] > 0


def test_op_swap_moves_what_its_modules_save(workspace):
    _, plain = train(workspace, OWN, "plain")
    block = "swap:\n  enable: true\n  op_swap:\n    - {op_name: attention, layers: ['0-2']}\n"
    result, swap = train(workspace, OWN + block, "swap")
    assert "3 units (model.layers.0.self_attn … model.layers.2.self_attn)" in result.out
    assert swap["loss"] == plain["loss"]
    assert swap["offloaded_bytes"] > 0


@pytest.mark.parametrize("where", ["train", "model"])
def test_offload_config_of_veomni(workspace, where):
    _, plain = train(workspace, OWN, "plain")
    block = (
        "  accelerator:\n    offload_config:\n      enable_async_activation: true\n"
        "      activation_offload_modules:\n        - model.layers.{*}\n"
    )
    text = OWN.replace("  seed: 1\n", "  seed: 1\n" + block) if where == "train" else OWN
    if where == "model":
        text = text.replace("  path: model\n", "  path: model\n" + block)
    result, offload = train(workspace, text, "offload")
    assert "offload async, 4 units" in result.out
    assert offload["loss"] == plain["loss"]
    assert offload["offloaded_bytes"] > 0


def test_the_configuration_a_run_leaves_has_our_own_sections_and_repeats_it(workspace):
    text = OWN + SWAP + "parallelism:\n  data_parallel_shard_strategy: optim\nrecompute_config:\n  recompute: True\n"
    write(workspace, text)
    assert workspace.train("--log.dir=a", *EVERYTHING_LEAVES).code == 0
    config = (workspace.path / "a" / "config.yaml").read_text()
    for line in '  layers: ["0-1", "2"]', "  mode: async", "  prefetch: 1", "  stage: optim\n", "  mode: full":
        assert line in config, line
    for block in "swap", "parallelism", "recompute_config":
        assert block not in config
    assert workspace.run("train", "a/config.yaml", "--log.dir=b").code == 0
    assert workspace.summary("a")["loss"] == workspace.summary("b")["loss"]
    assert workspace.summary("a")["offloaded_bytes"] == workspace.summary("b")["offloaded_bytes"] > 0


ACCELERATOR = "train:\n  sequence: 32\n  accelerator:\n    offload_config: {"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        # MindFormers
        ("swap: {enabel: true}\n", "[run.yaml:10] unknown key swap.enabel; nearest known key: swap.enable"),
        (
            "swap:\n  enable: true\n  layer_swap:\n    - layers: ['0-1']\n    - layers: ['2-4']\n",
            "[run.yaml:14, swap.layer_swap[1].layers] expected layers from 0 to 3; found 2-4",
        ),
        (
            "swap:\n  enable: true\n  layer_swap:\n    - layers: ['0-3']\n",
            "[run.yaml:10, swap.default_prefetch] links every swapped layer with the one that comes 1 later; layer 3",
        ),
        (
            "swap:\n  enable: true\n  default_prefetch: 4\n  layer_swap:\n    - layers: [0]\n",
            "[run.yaml:12, swap.default_prefetch] expected less than the number of layers, which is 4; found 4",
        ),
        ("swap: {default_prefetch: 0}\n", "[run.yaml:10] swap.default_prefetch: expected an integer from 1"),
        (
            "swap:\n  enable: true\n  op_swap:\n    - {op_name: atention, layers: ['0']}\n",
            "[offload.modules] pattern 'model.layers.0.atention'",
        ),
        (
            "swap: {enable: true}\noffload: {mode: sync}\n",
            "[run.yaml:11] offload.mode is what swap (run.yaml:10) stands for, too; keep one of the two",
        ),
        (
            "recompute: {mode: full, full_recompute_layer: ['0-9']}\n",
            "[run.yaml:10, recompute.full_recompute_layer] expected layers from 0 to 3; found 0-9",
        ),
        (
            "recompute: {mode: select, layers: [1]}\n",
            "[run.yaml:10] recompute.layers is a key of our own section, but recompute.mode (run.yaml:10) is MindF",
        ),
        ("parallelism: {tensor_parallel: 2}\n", "[run.yaml:10] parallelism.tensor_parallel: expected 1"),
        (
            "parallelism: {data_parallel_shard_strategy: zero3}\n",
            "[run.yaml:10] parallelism.data_parallel_shard_strategy: expected optim_grads_params, optim_grads or optim",
        ),
        # VeOmni
        (
            ACCELERATOR + "enable_activation: true, enable_async_activation: true}\n",
            "[run.yaml:13, train.accelerator.offload_config.enable_async_activation] expected one way of activation",
        ),
        (
            ACCELERATOR + "activation_offload_modules: ['model.layers.{*}']}\n",
            "[run.yaml:13, train.accelerator.offload_config.activation_offload_modules] expected enable_async_acti",
        ),
        (
            ACCELERATOR + "enable_async_activation: true, activation_offload_modules: ['model.layer.{*}']}\n",
            "[offload.modules] pattern 'model.layer.{*}': expected a module named 'model.layer'; found none; the near",
        ),
        (
            ACCELERATOR + "enable_activation: true, activation_gpu_limit: -1}\n",
            "[run.yaml:13] train.accelerator.offload_config.activation_gpu_limit: expected a number of at least 0",
        ),
        (
            ACCELERATOR + "enable_async_activation: true}\nswap: {enable: true}\n",
            "[run.yaml:14] swap and train.accelerator.offload_config (run.yaml:13",
        ),
    ],
)
def test_wrong_uses(workspace, block, message):
    text = "model:\n  path: model\ndata:\n  path: text.txt\ndevice:\n  type: sim\n"
    text += "# three lines\n#\n#\n" if block.startswith("train:") else "train:\n  steps: 3\n  sequence: 32\n"
    write(workspace, text + block)
    assert workspace.train().error_line().startswith(message)
    assert not (workspace.path / "runs").exists()


def test_blocks_are_not_for_the_command_line(workspace):
    line = workspace.train("--swap.enable=true").error_line()
    assert line.startswith("[--swap.enable] blocks of other systems are read from the run file alone")
