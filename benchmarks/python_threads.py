#!/usr/bin/env python3
"""What a saved tensor costs a Python program with nt.offload and with Python's hooks, also when threads want the GIL.

The graph is a chain of sin(), a module for each twelve of them. Three comparisons, the cases in turn:

1. Forward, backward and release on the simulated device, 16 floats a tensor, beyond the bare chain; the best of many
   rounds. Ours and save_on_cpu copy every tensor out and back, identity hooks copy nothing.
2. Backward there, a MiB a tensor, while another thread holds the interpreter for four times as long as that takes: how
   much of backward is then still to be done, the median. 1 where each saved tensor has to wait for Python, 0 where none
   has.
3. Two threads with a backward each at the same time, 16 floats a tensor, on the CPU, where backward runs on the thread
   that calls it; relative to one alone: 1 if both run at once, 2 if they take turns. The best of many rounds.
"""

import argparse
import contextlib
import ctypes
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from python_hooks import ROOT, best_of, figure
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

PER_UNIT = 12


def offload_options(elements):
    """All of it leaves and comes back, as in saved_tensor_cost.cpp."""
    return {"min_bytes": 0, "keep_last": 0, "max_in_flight": 16 * 4 * elements, "prefetch": 2}


class Unit(torch.nn.Module):
    def forward(self, x):
        for _ in range(PER_UNIT):
            x = x.sin()
        return x


class Chain(torch.nn.Module):
    """A chain of operators with one saved tensor each; its forward runs inside the context."""

    def __init__(self, tensors, elements, device, context):
        super().__init__()
        self.context = context
        self.layers = torch.nn.ModuleList(Unit() for _ in range(tensors // PER_UNIT))
        self.leaf = torch.ones(elements, device=device, requires_grad=True)
        self.grad = torch.ones(elements, device=device)

    def forward(self):
        y = self.leaf
        with self.context():
            for layer in self.layers:
                y = layer(y)
        return y


def identity_hooks():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def make_chains(nt, tensors, device, *, elements=16, **more):
    """The same chain bare, with nt.offload, with identity hooks, and in further contexts; and the handle."""
    nothing = contextlib.nullcontext
    contexts = {"bare": nothing, "offload": nothing, "identity_hooks": identity_hooks} | more
    chains = {name: Chain(tensors, elements, device, context) for name, context in contexts.items()}
    return chains, nt.offload(chains["offload"], **offload_options(elements))


def measure_costs(nt, sim, tensors=240, rounds=40):
    scope = nt.offload_scope(**offload_options(16))
    copies = partial(save_on_cpu, pin_memory=True, device_type="sim")
    chains, offload = make_chains(nt, tensors, "sim", offload_scope=lambda: scope, save_on_cpu=copies)

    def whole_pass(chain):
        began = time.perf_counter_ns()
        chain().backward(chain.grad)
        sim.synchronize()
        return time.perf_counter_ns() - began

    best = best_of(rounds, {name: partial(whole_pass, chain) for name, chain in chains.items()})
    for engine in (offload, scope):
        check_that_all_moved(engine, tensors * (rounds + 1))
    cost = {name: (took - best["bare"]) / tensors for name, took in best.items()}
    for name in list(cost)[1:]:
        figure(f"python_{name}_on_sim", cost[name], "ns")
    figure("python_offload_cheaper_than_save_on_cpu", cost["save_on_cpu"] / cost["offload"], "x", 10, "higher")


def check_that_all_moved(engine, expected):
    report = engine.take_step_report()
    found = min(report.offloaded_storages, report.reloaded_storages)
    if found < 0.9 * expected:  # the end of a pass is recalled while it is on its way out
        sys.exit(f"python_threads: {found} storages of {expected} went out and came back: not what was to be measured")


class Interpreter:
    """Lets another thread hold the interpreter: in one call of C that does not give it back."""

    def __init__(self, seconds):
        self.microseconds = int(seconds * 1e6)
        self.go = threading.Lock()
        self.given_back = 0.0

    def hold(self):
        with self.go:
            began = time.perf_counter()
            ctypes.PyDLL(None).usleep(self.microseconds)
        self.given_back = began + self.microseconds / 1e6

    def while_held(self, run):
        """Seconds from when the interpreter was given back until the end of `run`, which lets go of it early on."""
        self.go.acquire()
        thread = threading.Thread(target=self.hold)
        thread.start()
        self.go.release()
        run()
        ended = time.perf_counter()
        thread.join()
        return ended - self.given_back


def measure_without_interpreter(nt, sim, tensors=60, rounds=5):
    chains, _ = make_chains(nt, tensors, "sim", elements=1 << 18)
    for name in ("offload", "identity_hooks"):
        chain = chains[name]

        def prepared(chain=chain):
            y = chain()
            sim.synchronize()
            return partial(y.backward, chain.grad)

        alone, left = [], []
        for _ in range(rounds):
            run = prepared()
            began = time.perf_counter()
            run()
            alone.append(time.perf_counter() - began)
        usual = statistics.median(alone)
        for _ in range(rounds):
            left.append(Interpreter(4 * usual).while_held(prepared()) / usual)
        goal = 0.1 if name == "offload" else None
        figure(f"python_backward_that_awaits_the_interpreter_{name}", max(statistics.median(left), 0), "x", goal)


def backward_at_once(chains):
    """ns until each of the chains has run its backward, on a thread of its own."""
    start = threading.Barrier(len(chains))
    times = []

    def run(chain):
        y = chain()
        start.wait()
        began = time.perf_counter_ns()
        y.backward(chain.grad)
        times.append((began, time.perf_counter_ns()))

    threads = [threading.Thread(target=run, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in times) - min(begin for begin, _ in times)


def measure_threads(nt, tensors=4800, rounds=12):
    sides = [make_chains(nt, tensors, "cpu") for _ in range(2)]
    names = list(sides[0][0])
    pairs = {name: [chains[name] for chains, _ in sides] for name in names}
    best = best_of(
        rounds, {(name, count): partial(backward_at_once, pairs[name][:count]) for name in names for count in (1, 2)}
    )
    for name in names:
        figure(f"python_two_threads_{name}", best[name, 2] / best[name, 1], "x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    options = parser.parse_args()
    sys.path.insert(0, str(options.build / "python"))
    import neaptide as nt  # noqa: PLC0415
    from neaptide import sim  # noqa: PLC0415

    torch.set_num_threads(1)
    measure_costs(nt, sim)
    measure_without_interpreter(nt, sim)
    measure_threads(nt)


if __name__ == "__main__":
    main()
