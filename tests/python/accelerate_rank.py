"""One rank of a world of test_accelerate.py: trains under accelerate with offload and without, and prints what it saw.

accelerate_rank.py cpu|sim
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from distributed_rank import OPTIONS, begin, local, loss_of, measure
from training import Run, llama

import neaptide as nt

STEPS, ACCUMULATE = 2, 2


def accelerator_of(device, fsdp, checkpoint):
    """In bfloat16, with gradient accumulation."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which a plugin leaves there
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=checkpoint,
            mixed_precision_policy="bf16",
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE, fsdp_plugin=plugin
    )
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert accelerator.device.type == device
    if fsdp:
        # AcceleratorState takes a plugin on the devices that it lists, and goes on without it on others. What comes
        # behind that, which is what is tested, asks for none of them.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
    return accelerator


def train(device, *, fsdp, offload=None, checkpoint=False):
    """(Run, peak of the last step, report of the last step). offload: None, or "before" or "after" prepare()."""
    accelerator = accelerator_of(device, fsdp, checkpoint)
    model = llama().to(device)
    handle = nt.offload(model, **OPTIONS) if offload == "before" else None
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert (prepared is model) == fsdp
    if offload == "after":
        handle = nt.offload(prepared, **OPTIONS)
    run = Run()
    for step in range(STEPS):
        if handle is not None:
            handle.take_step_report()
        peak = measure(device)
        for micro in range(ACCUMULATE):
            with accelerator.accumulate(prepared):
                loss = loss_of(prepared, device, step * ACCUMULATE + micro)
                accelerator.backward(loss)
                run.losses.append(loss.detach().cpu())
                del loss
                assert accelerator.sync_gradients == (micro == ACCUMULATE - 1)
                if accelerator.sync_gradients:
                    run.losses.append(local(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)).cpu())
                    run.gradients.append({n: local(p.grad).cpu().clone() for n, p in prepared.named_parameters()})
                optimizer.step()
                optimizer.zero_grad()
        seen = peak()
    accelerator.free_memory()
    return run, seen, None if handle is None else handle.take_step_report()


def main():
    (device,) = sys.argv[1:]
    begin(device)
    seen = {}
    for fsdp, checkpoint in (False, False), (True, False), (True, True):
        plain, plain_peak, _ = train(device, fsdp=fsdp, checkpoint=checkpoint)
        for order in ("after", "before") if device == "sim" and not checkpoint else ("after",):
            run, peak, report = train(device, fsdp=fsdp, checkpoint=checkpoint, offload=order)
            run.assert_same(plain)
            case = f"{'fsdp2' if fsdp else 'ddp'} {'checkpoint ' if checkpoint else ''}{order}"
            seen[case] = {"moved": report.offloaded_bytes, "peak": peak, "plain": plain_peak}
    hazards = torch.sim.take_hazards() if device == "sim" else []
    print(json.dumps({"cases": seen, "hazards": hazards}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
