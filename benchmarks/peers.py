#!/usr/bin/env python3
"""A training step with each library's activation offload, side by side on the simulated device.

A Llama of transformers, 8 layers, 512 wide, 2x512 tokens, float32, with plain SGD inside backward: a gradient is
applied and dropped as soon as it is there, so that what is left at the peak are activations. Times are those of the
virtual clock, for kernels of 2.5 TFLOP/s and a link of 25 GB/s in each direction, and bytes are the device's: a slower
or busier machine has the same numbers. (TRL's vary by up to a percent from run to run.) Fails if ours trains to other
bits than a run without offload; says so if another one does.

Peers come from PyPI into the build tree; without a network they are left out, and the output says so.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import peer_adapters as adapters
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SMALL = MIB  # storages under this are not counted: ours leaves them alone, unless told otherwise
BATCH, SEQUENCE, VOCABULARY, LAYERS = 2, 512, 1024, 8
WARM_UP, LEARNING = 1, 3  # steps before the one that counts: of the peers, and of ours, which learns


def nothing():
    pass


@dataclass
class Way:
    """What a library has its users put around a forward pass and around a whole step."""

    around_forward: object = contextlib.nullcontext
    around_step: object = contextlib.nullcontext
    before_step: object = nothing


def plain(model):
    return Way()


def neaptide(model):
    import neaptide  # noqa: PLC0415

    neaptide.offload(model)
    return Way()


def on_cpu(model):
    return Way(around_forward=partial(save_on_cpu, pin_memory=True, device_type="sim"))


def torchtune(model):
    module = adapters.load_torchtune()
    if module is None:
        return None
    offload = module.OffloadActivations
    module.OffloadActivations = partial(offload, use_streams=True)
    try:  # its recipes: `output` is the head, of which nothing is offloaded
        context = module.get_act_offloading_ctx_manager(SimpleNamespace(output=model.lm_head), True)
    finally:
        module.OffloadActivations = offload
    return Way(around_forward=lambda: context)


def trl(model):
    module = adapters.load_trl()
    if module is None:
        return None
    context = module.get_act_offloading_ctx_manager(model, use_streams=True, warn_if_no_head=False)
    return Way(around_step=lambda: context)


def veomni(model):
    module = adapters.load_veomni()
    if module is None:
        return None
    module.apply_async_activation_offload(model, ["model.layers.{*}"])
    return Way(before_step=lambda: module.reset_async_activation_offload(model))


def veomni_everything(model):
    """Without its filter, which takes hidden states alone."""
    module = adapters.load_veomni()
    if module is None:
        return None
    modules = module.get_offload_modules(model, ["model.layers.{*}"])
    module.async_offload_modules(modules, hidden_states_idx=sys.maxsize)
    return Way(before_step=lambda: module.reset_async_activation_offload(model))


def checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Way()


def deepspeed(model):
    module = adapters.load_deepspeed()
    if module is None:
        return None
    checkpointing(model)
    context = module.get_checkpoint_hidden_states_offloading_ctx_manager()
    return Way(around_step=lambda: context)


WAYS = {
    "neaptide": neaptide,
    "save_on_cpu": on_cpu,
    "torchtune": torchtune,
    "trl": trl,
    "veomni": veomni,
    "veomni_everything": veomni_everything,
    "checkpointing": checkpointing,
    "deepspeed": deepspeed,
}
GOALS = {"activation_peak": 30, "step_ratio": 1.01, "bytes_out_per_eligible_byte": 1}


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train().to("sim")


def apply_and_drop(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-2)
    parameter.grad = None


def compute_loss(model, number):
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to("sim")
    logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def step(sim, model, way, number):
    """(loss, virtual ns, activation peak, bytes out, page-locked allocations) of one step."""
    sim.synchronize()
    sim.reset_peak_memory_stats()
    sim.reset_counters()
    began, before = sim.host_time_ns(), sim.memory_allocated()
    pinned = sim.pinned_memory_stats()["allocations"]
    way.before_step()
    with way.around_step():
        with way.around_forward():
            loss = compute_loss(model, number)
        loss.backward()
    sim.synchronize()
    took = sim.host_time_ns() - began
    peak = sim.max_memory_allocated() - before
    out = sim.counters()["d2h"]["bytes"]
    return loss.item(), took, peak, out, sim.pinned_memory_stats()["allocations"] - pinned


@dataclass
class Result:
    ns: int
    peak: int
    out: int
    pinned: int
    trained_to: list  # (loss, digest of the parameters) after each step


def digest(model):
    found = hashlib.blake2b()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy())
    return found.hexdigest()


def measure(sim, make_way, warm_up=WARM_UP):
    """A step after the warm-up, or None when the library cannot be had."""
    gc.collect()
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply_and_drop)
    way = make_way(model)
    if way is None:
        return None
    trained_to = []
    for number in range(warm_up + 1):
        loss, *numbers = step(sim, model, way, number)
        trained_to.append((loss, digest(model)))
    return Result(*numbers, trained_to)


def eligible_bytes():
    """Bytes of the storages that the layers save in one step, each once, without parameters and small ones."""
    model = make_model()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.nbytes() >= SMALL:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
        layer.register_forward_hook(lambda *_: hooks.__exit__())
    loss = compute_loss(model, 0)  # keeps all of them alive, so that no address comes twice
    del loss
    return sum(found.values())


def print_figure(name, value, unit, goal=None, better="lower"):
    line = {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "better": better}
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("way", nargs="*", choices=[*WAYS, []], help="these alone; all of them if none is given")
    options = parser.parse_args()
    sys.path.insert(0, str(options.build / "python"))
    from neaptide import sim  # noqa: PLC0415

    sim.configure(capacity="4GiB", clock="virtual", gflops=2500, d2h="25GB/s", h2d="25GB/s")
    eligible = eligible_bytes()
    base = measure(sim, plain, LEARNING)
    print(f"{'':18}   peak MiB    step   bytes out  pinned allocations  same bits")
    print(f"{'none':18} {base.peak / MIB:10.1f} {1:7.3f} {0:11.3f} {0:19d}  yes")
    print_figure("peers_none_activation_peak", base.peak / MIB, "MiB")
    wrong = False
    for name in options.way or WAYS:
        make_way = WAYS[name]
        try:
            result = measure(sim, make_way, LEARNING if make_way is neaptide else WARM_UP)
        except Exception as error:
            if make_way is neaptide:
                raise
            print(f"{name}: fails: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if result is None:
            print(f"{name}: left out, its release could not be fetched")
            continue
        figures = {
            "activation_peak": (result.peak / MIB, "MiB"),
            "step_ratio": (result.ns / base.ns, "x"),
            "bytes_out_per_eligible_byte": (result.out / eligible, "x"),
        }
        same = result.trained_to == base.trained_to[: len(result.trained_to)]
        wrong |= make_way is neaptide and not same
        peak, ratio, out = (value for value, _ in figures.values())
        print(f"{name:18} {peak:10.1f} {ratio:7.3f} {out:11.3f} {result.pinned:19d}  {'yes' if same else 'NO'}")
        for kind, (value, unit) in figures.items():
            print_figure(f"peers_{name}_{kind}", value, unit, GOALS[kind] if make_way is neaptide else None)
        if make_way is neaptide:
            print_figure("peers_neaptide_pinned_allocations", result.pinned, "per step", 0)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
