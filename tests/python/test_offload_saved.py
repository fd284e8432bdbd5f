"""What is hard about saved tensors: shared storages, changes in place, graphs that are used twice, late or never."""

import contextlib
import gc
import weakref

import pytest
import torch
from function_nets import DEPTH, ONE, SIDE, assert_same_gradients, loss_of, mlp, nets, rows
from training import Chain

import neaptide as nt


def test_a_tensor_and_its_transpose_are_moved_once(sim):
    def function(w, x):
        return x @ w[0] + x.t() @ w[1]

    plain, ours, handle = nets(function, 2)
    for net in (plain, ours):
        loss_of(net, 1, SIDE).backward()
    assert_same_gradients(ours, plain)
    assert handle.take_step_report().offloaded_bytes == DEPTH * SIDE * SIDE * 4


def test_chunks_of_one_projection_are_moved_once(sim):
    """https://gitcode.com/mindspore/hyper-parallel/issues, number 185: each view was copied."""

    def function(w, x):
        q, k, v = (x @ torch.cat(list(w), 1)).chunk(3, -1)
        return q * k * v

    plain, ours, handle = nets(function, 3)
    for net in (plain, ours):
        loss_of(net, 1).backward()
    assert_same_gradients(ours, plain)
    # A layer saves its input, the projection (three times that) and q * k; all but the first, whose input needs no
    # gradient, also the weights side by side.
    assert handle.take_step_report().offloaded_bytes == DEPTH * 5 * ONE + (DEPTH - 1) * 3 * SIDE * SIDE * 4


def change_result(w, x):
    return torch.relu(x @ w[0]).add_(1)


def change_input(w, x):
    y = x @ w[0]
    x.add_(1)
    return y + x


@pytest.mark.parametrize("function", [change_result, change_input])
def test_a_change_in_place_is_the_error_that_it_is_without_offload(sim, function):
    plain, ours, _ = nets(function, 1)
    for net in (plain, ours):
        x = rows(1).requires_grad_() * 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            net(x).square().sum().backward()


def test_backward_twice(sim):
    """https://github.com/ByteDance-Seed/VeOmni/pull/965: the second one raised."""
    plain, ours, _ = nets(mlp, 2)
    losses = [loss_of(net, 1) for net in (plain, ours)]
    for retain in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain)
        assert_same_gradients(ours, plain)


@pytest.mark.parametrize("kept", [False, True])
def test_a_forward_without_backward_disturbs_nothing(sim, kept):
    """https://github.com/huggingface/trl/pull/4236: an evaluation with gradients between two steps."""
    plain, ours, _ = nets(mlp, 2)
    late = [loss_of(net, 7) for net in (plain, ours)]
    if not kept:
        del late
    for seed in range(2):
        for net in (plain, ours):
            loss_of(net, seed).backward()
        assert_same_gradients(ours, plain)
    if kept:
        for loss in late:
            loss.backward()
        assert_same_gradients(ours, plain)


def test_a_forward_that_raises_leaves_nothing(sim):
    failing = []

    def function(w, x):
        y = torch.tanh(x @ w[0])
        if w in failing:
            raise KeyError("of the user's")
        return y @ w[1]

    plain, ours, _ = nets(function, 2)
    before = sim.memory_allocated()
    failing.append(ours.layers[1].w)
    with pytest.raises(KeyError):
        loss_of(ours, 0)
    failing.clear()
    gc.collect()
    sim.synchronize()
    assert sim.memory_allocated() == before
    for seed in range(2):
        for net in (plain, ours):
            loss_of(net, seed).backward()
        assert_same_gradients(ours, plain)


def test_inputs_that_the_caller_keeps_stay_what_they_are(sim):
    """https://gitcode.com/mindspore/hyper-parallel/issues, number 664: what the caller owned was freed."""
    plain, ours, handle = nets(mlp, 2)
    inputs = {plain: [], ours: []}
    for net, kept in inputs.items():
        for layer in net.layers:
            layer.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))

    def assert_same_inputs():
        assert len(inputs[ours]) == DEPTH
        for mine, other in zip(inputs[ours], inputs[plain], strict=True):
            assert torch.equal(mine.detach().cpu(), other.detach().cpu())

    losses = [loss_of(net, 1) for net in inputs]
    assert_same_inputs()
    for loss in losses:
        loss.backward()
    assert_same_inputs()
    assert_same_gradients(ours, plain)
    # Bytes that were copied and did not go away are told with the unit that saved them.
    assert sum(handle.take_step_report().still_referenced.values()) >= (DEPTH - 1) * ONE


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "sum", "the first alone"])
def test_two_forwards_before_their_backward(sim, order):
    plain, ours, _ = nets(mlp, 2)
    for net in (plain, ours):
        losses = [loss_of(net, seed) for seed in range(2)]
        if order == "sum":
            sum(losses).backward()
        else:
            chosen = {"last in, first out": losses[::-1], "the first alone": losses[:1]}.get(order, losses)
            for loss in chosen:
                loss.backward()
    assert_same_gradients(ours, plain)
    for net in (plain, ours):
        loss_of(net, 5).backward()
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_memory_that_is_not_aligned_to_its_elements(offset):
    """As a reader of files hands it out, over bytes of its own."""
    memory = bytearray(offset) + torch.randn(64 * 64).numpy().tobytes()
    weight = torch.randn(64, 64, requires_grad=True)
    losses = []
    for around in (contextlib.nullcontext(), nt.offload_scope(min_bytes=0, keep_last=0)):
        x = torch.frombuffer(memory, dtype=torch.float32, count=64 * 64, offset=offset).view(64, 64)
        with around:
            losses.append((x @ weight).square().sum())
        del x  # the engine alone has it
    plain, ours = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    torch.testing.assert_close(ours, plain)


def test_a_parameter_whose_data_is_exchanged_before_backward(device):
    """As it is where parameters are gathered for each use: backward uses what is there then, and the former is gone."""
    found, gone = [], []
    for around in (contextlib.nullcontext(), nt.offload_scope(min_bytes=0, keep_last=0)):
        x = torch.ones(8, 8, device=device, requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
        weakref.finalize(weight.data.untyped_storage(), gone.append, around)
        with around:
            y = x @ weight
        weight.data = weight.data * 2
        assert gone[-1:] == [around]
        y.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_work_on_several_streams(sim, mode):
    """What one stream saved another one brings back, or uses; the fixture looks for hazards."""
    streams = sim.Stream(), sim.Stream()
    layers = Chain().to("sim").layers
    handle = nt.offload(layers, mode=mode, min_bytes=0, max_in_flight=0, keep_last=1)
    scope = nt.offload_scope(mode=mode, min_bytes=0, max_in_flight=0, keep_last=0)
    start = torch.randn(32, 32, device="sim")
    weight = torch.randn(32, 32, device="sim", requires_grad=True)
    sim.synchronize()

    def in_turns():
        x, before = start, sim.current_stream()
        for i, layer in enumerate(layers):
            streams[i % 2].wait_stream(before)
            x.record_stream(streams[i % 2])
            with sim.stream(streams[i % 2]):
                x, before = layer(x), streams[i % 2]
        return x, before

    def side_by_side():
        with sim.stream(streams[0]):
            x = weight * 2
            y = x * x
        streams[1].wait_stream(streams[0])
        x.record_stream(streams[1])
        y.record_stream(streams[1])
        with sim.stream(streams[1]):
            return (x.sin() * y).exp(), streams[1]

    for run, around in ((in_turns, contextlib.nullcontext()), (side_by_side, scope)):
        for _ in range(2):
            with around:
                y, last = run()
                sim.current_stream().wait_stream(last)
                y.record_stream(sim.current_stream())
                loss = y.sum()
            del y
            loss.backward()
            sim.synchronize()
    assert all(each.take_step_report().reloaded_storages > 0 for each in (handle, scope))
    layers.zero_grad()


def test_what_is_on_the_cpu_does_not_decide_which_device_it_is_about(sim):
    scope = nt.offload_scope(min_bytes=0, keep_last=0)
    x = torch.randn(64, 64, device="sim", requires_grad=True)
    for _ in range(2):
        scope.take_step_report()
        with scope:
            loss = (x * torch.tensor(0.5)).sin().sum()
        loss.backward()
    assert scope.take_step_report().offloaded_bytes == 64 * 64 * 4

    model = Chain()
    model.layers[1:].to("sim")
    model.layers[1].register_forward_pre_hook(lambda _module, inputs: inputs[0].to("sim"))
    handle = nt.offload(model, min_bytes=0, keep_last=0)
    model(torch.randn(32, 32)).sum().backward()
    assert handle.take_step_report().offloaded_storages == 4
    model.zero_grad()
