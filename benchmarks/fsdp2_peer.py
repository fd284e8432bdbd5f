"""One rank of torch's own `fully_shard`, for fsdp2_step.py: the twin of shard_step.cpp.

With --neaptide the same model is sharded by nt.fully_shard.
"""

import argparse
import ctypes
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

SEQUENCE = 256
NARROW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def load_counter(path):
    counter = ctypes.CDLL(path)
    for name in ("neap_live_bytes", "neap_peak_bytes", "neap_reduction_scratch"):
        getattr(counter, name).restype = ctypes.c_int64
    counter.neap_count_cpu_tensors()
    return counter


def load_model(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def shard_by_torch(model, world, narrow):
    options = {"mesh": init_device_mesh("cpu", (world,))}
    if narrow:
        options["mp_policy"] = MixedPrecisionPolicy(**NARROW)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def shard_by_neaptide(package, model, narrow):
    sys.path.insert(0, package)
    import neaptide  # noqa: PLC0415

    neaptide.fully_shard(model, **NARROW if narrow else {})


def step(model, optimizer, number, rank):
    tokens = ((torch.arange(SEQUENCE + 1) * 31 + number * 7 + rank * 101) % model.config.vocab_size).view(1, -1)
    # shift_labels: as the C++ side, every position has a label.
    labels = tokens[:, 1:].contiguous()
    loss = model(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def next_turn(rank, world):
    """Rank 0 reads a line for each step; the others learn of it from rank 0."""
    go = torch.tensor([1 if rank == 0 and sys.stdin.readline() else 0])
    if world > 1:
        dist.broadcast(go, 0)
        dist.barrier()
    return go.item() != 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("counter")
    parser.add_argument("model")
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--neaptide", metavar="FOLDER", help="where the package is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counter = load_counter(arguments.counter)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    model = load_model(arguments.model)
    narrow, scratch = arguments.dtype == "bfloat16", 0
    if arguments.neaptide:
        shard_by_neaptide(arguments.neaptide, model, narrow)
        scratch = counter.neap_reduction_scratch(world)
    elif world > 1:
        shard_by_torch(model, world, narrow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if rank == 0:
        print("ready", flush=True)
    number = 0
    while next_turn(rank, world):
        counter.neap_reset_peak_bytes()
        begin = time.perf_counter()
        loss = step(model, optimizer, number, rank)
        if world > 1:
            dist.barrier()
        milliseconds = (time.perf_counter() - begin) * 1e3
        if rank == 0:
            rest, peak = counter.neap_live_bytes(), counter.neap_peak_bytes() + scratch
            print(json.dumps({"ms": milliseconds, "loss": loss, "rest": rest, "peak": peak}), flush=True)
        number += 1
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
