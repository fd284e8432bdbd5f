"""A Hugging Face model over several ranks: train.py MODEL TOKENS OUT, under torchrun."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import neaptide as nt

STEPS, BATCH, LENGTH = 20, 2, 128
model_path, tokens_path, out = sys.argv[1:]

device = torch.accelerator.current_accelerator() or torch.device("cpu")
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
if device.type != "cpu":
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device).train()
model.gradient_checkpointing_enable({"use_reentrant": False})
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
offload = nt.offload(model, min_bytes="16KiB")

tokens = np.memmap(tokens_path, dtype="<u2", mode="r")
rows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    begin = (step * world + rank) * BATCH % (len(rows) - BATCH)
    batch = torch.from_numpy(rows[begin : begin + BATCH].astype(np.int64)).to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")

if rank == 0:
    print(offload.take_step_report())
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    model.save_pretrained(out, state_dict=state)
dist.destroy_process_group()
