"""Bugs that users of other libraries have reported, tried on ours from Python.

What another test shows anyway has its URL there; tests/issues has those of the C++ library.
"""

import warnings

import pytest
import torch
from function_nets import DEPTH, ONE, ROWS, SIDE, assert_same_gradients, loss_of, nets
from shard_processes import run
from torch.utils.checkpoint import checkpoint
from training import Chain, chain_loss, language_loss, lora, tokens, train

import neaptide as nt

MIN = {"min_bytes": 0, "keep_last": 0}


def trained_alike(plain, ours, handle, *bodies):
    """Each body(net) is a step of both; gradients are compared after each."""
    for body in bodies:
        for net in (plain, ours):
            body(net)
        assert_same_gradients(ours, plain)
    return handle.take_step_report()


# ---- what is unpacked


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_saves_views_of_what_came_back_and_indexes_by_masks(sim, reentrant):
    """https://github.com/meta-pytorch/torchtune/issues/1867: unpacked tensors were let go too early; NaN gradients.
    https://github.com/meta-pytorch/torchtune/pull/1913: the second run saves a view of one."""

    def function(w, x):
        def block(x):
            y = x.view(-1).sin().view_as(x) @ w[0]
            return torch.zeros_like(y).masked_scatter(y > 0, y[y > 0].tanh()) @ w[1]

        return checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)

    steps = [lambda net, seed=seed: loss_of(net, seed).backward() for seed in range(3)]
    report = trained_alike(*nets(function, 2), *steps)
    assert report.offloaded_bytes == 3 * (DEPTH - 1) * ONE  # the blocks' inputs; the first one is a leaf


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_tensor_that_three_operators_save_leaves_once_and_is_let_go_of(sim, mode):
    """https://github.com/huggingface/trl/pull/7193: without streams nothing was let go of; found in its source: nor was
    what is saved twice. https://github.com/facebookresearch/fairscale/issues/947,
    https://github.com/hpcaitech/ColossalAI/issues/643: "moved" activations that stayed."""

    def function(w, x):
        h = x.tanh()
        return h @ w[0] + h @ w[1] + h @ w[2]

    held = {}
    plain, ours, handle = nets(function, 3, mode=mode)
    for net in (plain, ours):
        sim.synchronize()
        before = sim.memory_allocated()
        loss = loss_of(net, 1)
        sim.synchronize()
        held[net] = sim.memory_allocated() - before
        loss.backward()
        del loss
    assert_same_gradients(ours, plain)
    assert held[plain] - held[ours] == DEPTH * ONE
    report = handle.take_step_report()
    assert (report.offloaded_storages, report.offloaded_bytes) == (DEPTH, DEPTH * ONE)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(ROWS, SIDE),
    "at an offset": lambda x: x[5:, 3:],
    "channels last": lambda x: x.view(ROWS, 4, 8, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_tensors_come_back_with_their_strides(sim, layout):
    """https://github.com/huggingface/trl/pull/5694: those that were not contiguous crashed."""
    view, seen = LAYOUTS[layout], []

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            seen.append((x.stride(), x.detach().cpu()))
            return 2 * grad * x

    def function(w, x):
        return x @ w[0] + Saved.apply(view(x @ w[1])).mean()

    report = trained_alike(*nets(function, 2), lambda net: loss_of(net, 1).backward())
    assert report.offloaded_bytes > 0
    for (strides, values), (expected, others) in zip(seen[:DEPTH], seen[DEPTH:], strict=True):
        assert strides == expected
        assert torch.equal(values, others)


def slices(w, x):
    return x[:, :64].sin().sum(1, keepdim=True) + x @ w[0]


def padded(w, x):
    base = (x @ w[0]).repeat(2, 1)
    alias = base[:ROWS].detach()  # shares the storage, and knows of no base
    return x * alias + base[ROWS:].cos()


@pytest.mark.parametrize("function", [slices, padded])
def test_a_part_of_a_storage_leaves_the_rest_of_it_alone(sim, function):
    """https://github.com/ByteDance-Seed/VeOmni/pull/965: all of it was resized away."""
    report = trained_alike(*nets(function, 1), *[lambda net: loss_of(net, 1).backward()] * 2)
    assert report.offloaded_bytes > 0


def test_tensors_of_other_devices_and_kinds_pass_untouched(sim):
    """https://github.com/meta-pytorch/torchtune/issues/2456: a tensor that was saved on the CPU came back elsewhere."""

    class Marked(torch.Tensor):
        pass

    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    others = [
        torch.arange(12.0),
        torch.get_rng_state(),
        torch.eye(4).to_sparse(),
        torch.ones(8, device="sim").as_subclass(Marked),
        torch.arange(8, device="sim"),
        torch.ones(8, dtype=torch.bool, device="sim"),
        torch.tensor(3.0, device="sim"),
        torch.empty(0, 4, device="sim"),
        nested,
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        None,
    ]
    back = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, *others)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            x, *rest = ctx.saved_tensors
            back.extend(rest)
            return grad * x.cos()

    report = trained_alike(*nets(lambda w, x: Saves.apply(x @ w[0]), 1), lambda net: loss_of(net, 1).backward())
    assert report.offloaded_bytes > 0
    assert len(back) == 2 * DEPTH * len(others)
    for found, saved in zip(back, others * (2 * DEPTH), strict=True):
        assert type(found) is type(saved)
        if saved is None:
            continue
        assert (found.device, found.dtype, found.layout) == (saved.device, saved.dtype, saved.layout)
        if saved.is_nested:
            assert [part.tolist() for part in found.unbind()] == [[1, 1], [1, 1, 1]]
            continue
        assert torch.equal(found.to_dense().cpu(), saved.to_dense().cpu())
        if saved.device.type == "cpu" and not saved.is_sparse:
            assert found.data_ptr() == saved.data_ptr()


# ---- changes in place, of which PyTorch takes no note where saved tensors have hooks (saved_variable.cpp)


@pytest.mark.parametrize("too_late", [False, True])
def test_an_addition_in_place_behind_an_adapter(device, too_late):
    """Into what backward needs it is autograd's error, as axolotl's documentation says it is not with its offload, and
    https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/saved_variable.cpp why: what has hooks is not
    checked. Before it is saved, it is fine."""

    def before(_module, args):
        args[0].add_(1)

    def after(_module, args, _output):
        args[0].add_(1)

    def make(offload):
        model = lora(target_modules=["gate_proj"]).to(device)
        for layer in model.base_model.model.model.layers:
            activation = layer.mlp.act_fn
            activation.register_forward_hook(after) if too_late else activation.register_forward_pre_hook(before)
        if offload:
            nt.offload(model, **MIN)
        return model

    plain, ours = make(offload=False), make(offload=True)
    if not too_late:
        train(ours, device).assert_same(train(plain, device))
        return
    for model in (plain, ours):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            language_loss(model, device, 0).backward()
    if device == "sim":
        torch.sim.take_hazards()  # the copy was overwritten, and is not used


def test_a_weight_that_is_written_between_forward_and_backward(sim):
    plain, ours, _ = nets(lambda w, x: torch.tanh(x @ w[0].t()), 1)
    for net in (plain, ours):
        loss = loss_of(net, 1)
        with torch.no_grad():
            net.layers[1].w[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- steps that do not go the usual way


def test_what_no_backward_asks_for_is_let_go_of_with_the_outputs(device):
    """https://github.com/huggingface/trl/issues/4280: an assertion that every saved tensor was asked for."""
    outputs = []

    def half(model, device, step):
        batch = tokens(device, step)
        outputs[:] = [model(input_ids=batch, labels=batch, output_hidden_states=True)]
        return outputs[0].hidden_states[2].square().mean()  # of the second of four layers

    plain = train(lora().to(device), device, loss=half)
    model = lora().to(device)
    handle = nt.offload(model, **MIN)
    train(model, device, loss=half).assert_same(plain)
    assert handle.host_counters().requested > 0
    outputs.clear()
    assert handle.host_counters().requested == 0


def test_a_scope_that_is_left_before_backward_keeps_nothing(sim):
    """https://github.com/huggingface/trl/pull/5700: gigabytes outlived the context; and backward runs outside of it."""
    plain, ours = Chain().to("sim"), Chain().to("sim")
    scope = nt.offload_scope(ours, **MIN)
    sim.synchronize()
    before = sim.memory_allocated()
    for step in range(10):
        with scope:
            loss = chain_loss(ours, "sim", step)
        if step % 3 != 0:
            loss.backward()
            chain_loss(plain, "sim", step).backward()
            assert_same_gradients(ours, plain)
        del loss
        sim.synchronize()
        assert sim.memory_allocated() == before
        assert scope.host_counters().requested == 0


def test_passes_without_gradients_teach_nothing(device):
    """https://github.com/NVIDIA-NeMo/RL/pull/2279: they were taken for the pass that is learned from.
    https://github.com/unslothai/unsloth/issues/3828: buffers that were first used in inference mode."""
    plain = train(Chain().to(device), device, loss=chain_loss)
    model = Chain().to(device)
    with torch.inference_mode():
        handle = nt.offload(model, **MIN)
        chain_loss(model, device, 0)
    with torch.no_grad():
        chain_loss(model, device, 0)
    train(model, device, loss=chain_loss).assert_same(plain)
    report = handle.take_step_report()
    assert report.passes == 3
    assert report.offloaded_bytes > 0


def test_two_models_take_turns(device):
    """https://github.com/ByteDance-Seed/VeOmni/pull/965: one manager for all that the process trains."""

    def both(models, device, step):
        losses = [chain_loss(model, device, step) for model in models]
        return losses[0] * losses[1].detach() + losses[1].exp()

    def pair():
        return torch.nn.ModuleList([Chain(3), Chain(5)]).to(device)

    plain = train(pair(), device, loss=both)
    models = pair()
    handles = [nt.offload(model, **MIN) for model in models]
    train(models, device, loss=both).assert_same(plain)
    reports = [handle.take_step_report() for handle in handles]
    assert [report.passes for report in reports] == [3, 3]
    # What goes into each layer, and what comes out of the last.
    assert [report.offloaded_storages for report in reports] == [3 * 4, 3 * 6]


# ---- units and limits


def test_what_comes_as_a_keyword_is_offloaded(device):
    """https://github.com/ByteDance-Seed/VeOmni/pull/872: it was not, without a word."""

    class Keywords(Chain):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x=x)
            return x

    moved = []
    for make in (Chain, Keywords):
        model = make().to(device)
        handle = nt.offload(model, **MIN)
        chain_loss(model, device, 0).backward()
        moved.append(handle.take_step_report().offloaded_bytes)
    assert moved[0] == moved[1] > 0


def test_units_with_gaps_that_save_different_numbers_of_tensors(device):
    """https://github.com/ByteDance-Seed/VeOmni/pull/965: prefetch took the neighbour for the unit before."""

    def make():
        return torch.nn.Sequential(*(Chain(1 + i % 3) for i in range(6))).to(device)

    plain = train(make(), device, loss=chain_loss)
    model = make()
    handle = nt.offload(model, ["0", "2", "5"], **MIN, prefetch=1)
    assert handle.units == ["0", "2", "5"]
    train(model, device, loss=chain_loss).assert_same(plain)
    report = handle.take_step_report()
    assert report.reloaded_storages + report.forwarded_unpacks > 0
    assert report.never_hit == []


def test_a_host_limit_of_nothing_moves_nothing(device):
    """https://github.com/pytorch/torchtitan/pull/4636: it was taken for no limit."""
    plain = train(Chain().to(device), device, loss=chain_loss)
    model = Chain().to(device)
    handle = nt.offload(model, **MIN, host_limit=0)
    train(model, device, loss=chain_loss).assert_same(plain)
    assert handle.take_step_report().offloaded_bytes == 0
    assert handle.host_counters().locked == 0


def test_each_option_stands_alone():
    """https://github.com/Nerogar/OneTrainer/issues/1136: offload was off unless another option was set, too."""
    for option in {}, {"prefetch": 1}, {"max_in_flight": 0}, {"mode": "sync"}, {"host_limit": "1MiB"}:
        model = Chain()
        handle = nt.offload(model, min_bytes=0, **option)
        chain_loss(model, "cpu", 0).backward()
        assert handle.take_step_report().offloaded_bytes > 0, option


def test_a_peak_that_offload_cannot_lower_is_said_so(sim):
    """https://github.com/huggingface/accelerate/pull/4175, https://github.com/deepspeedai/DeepSpeed/issues/522: memory
    was what it was without, and nobody said why."""
    model = Chain(layers=6, side=256).to("sim")
    handle = nt.offload(model, **MIN, prefetch=1, max_in_flight=0)
    sim.reset_peak_memory_stats()
    model(torch.randn(4, 256).to("sim")).sum().backward()  # the peak: a gradient of every weight
    findings = handle.take_step_report().findings()
    assert any(line.endswith("it is not made of saved activations, and offload cannot lower it") for line in findings)


# ---- compilation, and tensors without data


def test_compilation_inside_a_scope_unpacks_nothing():
    """https://github.com/pytorch/pytorch/issues/113263: hooks of the surroundings ran while a graph was traced.
    https://github.com/pytorch/pytorch/issues/116221: hooks were left out of what is compiled, without a word."""
    torch._dynamo.reset()
    plain = train(Chain(), "cpu", loss=chain_loss)
    model = Chain()
    compiled = torch.compile(model, backend="aot_eager")
    scope = nt.offload_scope(model, **MIN, max_in_flight=0)
    with scope:
        loss = chain_loss(compiled, "cpu", 0)
    traced = scope.take_step_report()
    assert traced.offloaded_storages > 0
    assert traced.reloaded_storages == traced.forwarded_unpacks == 0
    loss.backward()
    assert scope.take_step_report().reloaded_storages > 0
    assert all(torch.equal(p.grad, plain.gradients[0][name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_meta_tensors_run_as_they_do_without_offload(reentrant):
    """https://github.com/pytorch/pytorch/issues/133550: checkpoints of them failed."""

    class Again(Chain):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    with torch.device("meta"):
        model = torch.nn.Sequential(*(Again() for _ in range(3)))
        x = torch.empty(8, 32, requires_grad=True)
    handle = nt.offload(model, **MIN)
    model(x).sum().backward()
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in model.parameters())
    assert handle.take_step_report().offloaded_bytes == 0


# ---- sharding: scenarios of shard_reported_bugs.py


def test_models_that_are_hard_to_shard_and_ranks_that_disagree():
    run("adapters", "used_by_some", "retained", "used_late", "scaled", "shapes", "shared_bias", "failed", "other_units")
