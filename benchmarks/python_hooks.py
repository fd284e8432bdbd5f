#!/usr/bin/env python3
"""What a saved tensor costs with Python's hooks, beside what it costs with ours: the same graph in the same run.

Runs `offload_bench saved_tensor`, passes its figures on, measures the same chain of sin() of 16 floats with identity
hooks, torch's save_on_cpu and torchtune's OffloadActivations, and prints how many times cheaper ours is. As in
offload_bench: a cost is what forward and backward take beyond the bare chain, best of many rounds, cases in turn.

On the CPU nothing is copied by Python's hooks, so they are compared with the scope that keeps the tensor. On the
simulated device both sides copy out and back.
"""

import argparse
import contextlib
import ctypes
import json
import subprocess
import time
import types
from functools import partial
from pathlib import Path

import torch
from peer_adapters import TORCHTUNE, load_torchtune
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

ROOT = Path(__file__).resolve().parent.parent


def figure(name, value, unit, goal=None, better="lower"):
    print(
        json.dumps({"name": name, "value": round(value, 3), "unit": unit, "goal": goal, "better": better}), flush=True
    )


def ours(bench):
    """Figures of offload_bench by name; prints them."""
    done = subprocess.run([bench, "saved_tensor"], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="", flush=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["value"] for line in lines}


def costs(contexts, *, tensors, rounds, device, clock, synchronize=lambda: None):
    """ns per saved tensor of each context, beyond the first."""
    grad = torch.ones(16, device=device)
    leaf = torch.ones(16, device=device, requires_grad=True)

    def once(make_context):
        began = clock()
        y = leaf
        with make_context():
            for _ in range(tensors):
                y = y.sin()
        y.backward(grad)
        del y
        synchronize()
        return clock() - began

    best = best_of(rounds, {name: partial(once, make_context) for name, make_context in contexts.items()})
    bare = next(iter(best.values()))
    return {name: (took - bare) / tensors for name, took in best.items()}


def best_of(rounds, cases):
    """What each case returns at its best; the cases take turns, after a round that warms up."""
    best = dict.fromkeys(cases, float("inf"))
    for turn in range(rounds + 1):
        for name, run in cases.items():
            took = run()
            if turn > 0:
                best[name] = min(best[name], took)
    return best


def load_sim(library):
    """Registers the simulated device in this process, with the few names of torch.cuda that the peers ask for."""
    torch.accelerator.is_available()
    ctypes.CDLL(str(library)).neap_sim_control_v3()
    accelerator = torch.accelerator
    module = types.ModuleType("torch.sim")
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.current_device = lambda: 0
    module.current_stream = module.default_stream = lambda device=None: accelerator.current_stream(0)
    module.Stream = lambda: torch.Stream(device="sim:0")
    module.stream = lambda stream: stream  # a torch.Stream is its own context manager
    module.synchronize = lambda device=None: accelerator.synchronize(0)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    options = parser.parse_args()
    torch.set_num_threads(1)
    neap = ours(options.build / "benchmarks" / "offload_bench")

    # Before the first backward: that is when autograd makes its threads, one for each device.
    sim = load_sim(options.build / "neap" / "sim" / "torch" / "libneap_sim.so")

    contexts = {"bare": contextlib.nullcontext, "save_on_cpu": lambda: save_on_cpu(pin_memory=True, device_type="sim")}
    torchtune = load_torchtune()
    if torchtune is None:
        print(f"{TORCHTUNE} could not be had: not compared")
    else:
        contexts["torchtune"] = lambda: torchtune.OffloadActivations(
            use_pin_memory=True, use_streams=True, min_offload_size=0
        )
    on_sim = costs(
        contexts, tensors=240, rounds=20, device="sim:0", clock=time.perf_counter_ns, synchronize=sim.synchronize
    )
    engine = neap["saved_tensor_on_sim_engine"]
    for name in list(contexts)[1:]:
        figure(f"{name}_on_sim", on_sim[name], "ns")
        figure(f"engine_cheaper_than_{name}_on_sim", on_sim[name] / engine, "x", 10, "higher")

    # Last: autograd's thread of a device that has just run a backward may still want the interpreter when the process
    # ends, and then torch aborts.
    identity = lambda: saved_tensors_hooks(lambda t: t, lambda t: t)  # noqa: E731
    contexts = {"bare": contextlib.nullcontext, "identity": identity, "save_on_cpu": save_on_cpu}
    cpu = costs(contexts, tensors=240, rounds=200, device="cpu", clock=time.thread_time_ns)
    scope = neap["saved_tensor_in_graph_scope"]
    figure("python_identity_hooks_in_graph", cpu["identity"], "ns")
    figure("python_save_on_cpu_in_graph", cpu["save_on_cpu"], "ns")
    figure("scope_cheaper_than_identity_hooks", cpu["identity"] / scope, "x", None, "higher")
    figure("scope_cheaper_than_save_on_cpu", cpu["save_on_cpu"] / scope, "x", 10, "higher")


if __name__ == "__main__":
    main()
