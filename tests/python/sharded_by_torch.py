"""One rank of test_offload_fsdp.py: a model in pieces by torch's fully_shard, with and without offload."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from training import llama, tokens

import neaptide as nt


def steps(order, checkpoint):
    """Losses and gradients of three steps, and the engine's report."""
    model, handle = llama(), None
    if order == "offload first":
        handle = nt.offload(model, min_bytes=0, keep_last=0)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if order == "sharding first":
        handle = nt.offload(model, min_bytes=0, keep_last=0)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for step in range(3):
        batch = tokens("cpu", 2 * step + dist.get_rank())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        values += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return values, handle and handle.take_step_report()


def main():
    dist.init_process_group("gloo")
    for checkpoint in (False, True):
        expected, _ = steps(None, checkpoint)
        for order in ("offload first", "sharding first"):
            values, report = steps(order, checkpoint)
            assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), (order, checkpoint)
            assert report.offloaded_bytes > 0
            assert report.never_hit == []
            print(f"equal: {order}, checkpoint {checkpoint}, {report.saved_tensors} tensors", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
