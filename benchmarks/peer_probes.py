#!/usr/bin/env python3
"""What is hard about saved tensors, tried on each library's activation offload on the simulated device.

Eight small programs, each right or wrong. Right means: the gradients of a run without offload, to the last bit, and
no use of memory whose copy is still under way, which the device's hazard checker finds; or autograd's own error where
that run has it. For shared storages also: each byte crossed the link once.
"""

import argparse
import contextlib
import functools
import gc
import sys
from pathlib import Path

import torch
from peers import ROOT, WAYS, Way, print_figure
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

ROWS, SIDE, DEPTH = 512, 256, 3


class Layer(GradientCheckpointingLayer):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = torch.nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(3))

    def forward(self, hidden_states):
        return self.function(self.w, hidden_states)


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer(function) for _ in range(DEPTH))
        self.lm_head = torch.nn.Identity()

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(x)

    def gradient_checkpointing_enable(self, options):
        """As a model of transformers has it."""
        for layer in self.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, **options)


class Trial:
    """A net, and the way in which a library has its users run it."""

    def __init__(self, function, make_way):
        self.net = Net(function).to("sim")
        self.way = make_way(self.net)

    def step(self, body):
        """body(forward): forward(seed) is the loss."""
        self.way.before_step()
        with self.way.around_step():
            return body(self.loss)

    def loss(self, seed, rows=ROWS):
        x = torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(seed)).to("sim").requires_grad_() * 1.0
        with self.way.around_forward():
            y = self.net(x)
        return y.square().sum()

    def gradients(self):
        """And takes them away."""
        found = [None if p.grad is None else p.grad.cpu() for p in self.net.parameters()]
        self.net.zero_grad()
        return found


def same(ours, plain):
    pairs = zip(ours, plain, strict=True)
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def mlp(w, x):
    return torch.tanh(x @ w[0]) @ w[1]


def agree(function, make_way, *bodies):
    """Each body is a step; gradients are compared after each."""
    plain, trial = Trial(function, lambda _: Way()), Trial(function, make_way)
    for body in bodies:
        for each in (plain, trial):
            each.step(body)
        if not same(trial.gradients(), plain.gradients()):
            return False
    return True


def moved_once(function, make_way, rows, elements):
    plain, trial = Trial(function, lambda _: Way()), Trial(function, make_way)
    for each in (plain, trial):
        torch.sim.synchronize()
        torch.sim.reset_counters()
        each.step(lambda loss: loss(1, rows).backward())
        torch.sim.synchronize()
    moved = torch.sim.counters()["d2h"]["bytes"]
    return same(trial.gradients(), plain.gradients()) and moved <= 4 * elements


def transpose(make_way):
    def function(w, x):
        return x @ w[0] + x.t() @ w[1]

    return moved_once(function, make_way, SIDE, DEPTH * SIDE * SIDE)


def chunks(make_way):
    def function(w, x):
        q, k, v = (x @ torch.cat(list(w), 1)).chunk(3, -1)
        return q * k * v

    return moved_once(function, make_way, ROWS, DEPTH * (5 * ROWS * SIDE + 3 * SIDE * SIDE))


def changed_in_place(make_way):
    def function(w, x):
        return torch.relu(x @ w[0]).add_(1)

    trial = Trial(function, make_way)
    try:
        trial.step(lambda loss: loss(1).backward())
    except RuntimeError as error:
        torch.sim.take_hazards()  # the copy was overwritten, and is not used
        return "modified by an inplace operation" in str(error)
    return False


def backward_twice(make_way):
    def body(loss):
        value = loss(1)
        value.backward(retain_graph=True)
        value.backward()

    return agree(mlp, make_way, body, body)


def no_backward(make_way):
    return agree(
        mlp, make_way, lambda loss: loss(7) and None, *(lambda loss, i=i: loss(i).backward() for i in range(2))
    )


def exception(make_way):
    failing = []

    def function(w, x):
        y = torch.tanh(x @ w[0])
        if failing and y.sum() != 0:
            raise KeyError
        return y @ w[1]

    plain, trial = Trial(function, lambda _: Way()), Trial(function, make_way)
    failing.append(True)
    for each in (plain, trial):
        with contextlib.suppress(KeyError):
            each.step(lambda loss: loss(0).backward())
    failing.clear()
    for seed in range(2):
        for each in (plain, trial):
            each.step(lambda loss, seed=seed: loss(seed).backward())
        if not same(trial.gradients(), plain.gradients()):
            return False
    return True


def kept_input(make_way):
    plain, trial = Trial(mlp, lambda _: Way()), Trial(mlp, make_way)
    kept = {plain: [], trial: []}
    for each, inputs in kept.items():
        for layer in each.net.model.layers:
            layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        each.step(lambda loss: loss(1).backward())
    untouched = all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in zip(*kept.values(), strict=True))
    return untouched and same(trial.gradients(), plain.gradients())


def two_forwards(make_way):
    def in_order(*order):
        def body(loss):
            losses = [loss(seed) for seed in range(2)]
            for index in order:
                losses[index].backward()

        return body

    return agree(mlp, make_way, in_order(0, 1), in_order(1, 0), in_order(0), in_order(0, 1))


PROBES = (transpose, chunks, changed_in_place, backward_twice, no_backward, exception, kept_input, two_forwards)


def is_right(probe, make_way):
    """(right, why not)."""
    gc.collect()
    torch.sim.synchronize()
    torch.sim.take_hazards()
    try:
        right, why = probe(make_way), ""
    except Exception as error:
        right, why = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:90]
    hazards = torch.sim.take_hazards()
    return right and not hazards, why or ("memory still in use" if hazards else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(options.build / "python"))
    import neaptide  # noqa: PLC0415
    from neaptide import sim  # noqa: PLC0415

    sim.configure(capacity="2GiB", hazard_check=True, d2h="25GB/s", h2d="25GB/s")

    def ours(net):
        neaptide.offload(net, min_bytes=0, keep_last=0)
        return Way()

    ways = WAYS | {"neaptide": ours}
    for name, make_way in ways.items():
        if make_way(Net(mlp)) is None:
            print(f"{name}: left out, its release could not be fetched")
            continue
        right = 0
        for probe in PROBES:
            good, why = is_right(probe, make_way)
            right += good
            print(f"{name:18} {probe.__name__:17} {'right' if good else 'wrong'}  {why}", flush=True)
        print_figure(f"peers_{name}_probes_right", right, "of 8", 8 if make_way is ours else None, "higher")


if __name__ == "__main__":
    main()
