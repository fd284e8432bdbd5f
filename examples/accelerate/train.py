"""A Hugging Face model over several ranks: train.py [--fsdp] MODEL TOKENS OUT, under torchrun or accelerate launch."""

import argparse
import sys
from itertools import islice

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import neaptide as nt

STEPS, ACCUMULATION, BATCH, LENGTH = 20, 2, 2, 128
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fsdp", action="store_true", help="accelerate's FSDP2 plugin; else DistributedDataParallel")
parser.add_argument("paths", nargs=3, metavar="PATH")
options = parser.parse_args()
model_path, tokens_path, out = options.paths

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(
    cpu=not torch.accelerator.is_available(),
    mixed_precision="bf16",
    gradient_accumulation_steps=ACCUMULATION,
    fsdp_plugin=plugin if options.fsdp else None,
)
if options.fsdp and not accelerator.is_fsdp2:  # accelerate would go on without the plugin
    sys.exit(
        "--fsdp: expected ranks on accelerators on which accelerate has FSDP (CUDA, XPU, NPU and others); found "
        f"{accelerator.num_processes} on {accelerator.device.type}, where the script runs without --fsdp"
    )

tokens = np.fromfile(tokens_path, dtype="<u2").astype(np.int64)
rows = torch.from_numpy(tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH))
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(0)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH, shuffle=True, drop_last=True))
offload = nt.offload(model, min_bytes="16KiB")

step = 0
for batch in islice(batches, STEPS * ACCUMULATION):
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            step += 1
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
        optimizer.step()
        optimizer.zero_grad()

accelerator.print(offload.take_step_report())
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(out, is_main_process=accelerator.is_main_process, state_dict=state)
accelerator.end_training()
