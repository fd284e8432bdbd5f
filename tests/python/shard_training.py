"""What the ranks of test_fully_shard.py train, and what they compare it with."""

import contextlib
import functools

import torch
import torch.distributed as dist
from training import language_loss, llama

STEPS = 5


def rank_loss(model, device, step, rank, micro=0):
    return language_loss(model, device, 1000 * rank + 10 * step + micro)


def placed(device, **changes):
    """A Llama on a device. Moving it to another kind of device makes two parameters of a tied one (torch does that)."""
    model = llama(**changes).to(device)
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(changes.get("tie_word_embeddings"))
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def one_process(device, *, micro_batches=1, loss=rank_loss, make=placed, **changes):
    """The ranks' micro-batches one after another, their gradients added in rank order: (losses by rank, state)."""
    model = make(device, **changes)
    optimizer = adamw(model)
    losses = [[] for _ in range(dist.get_world_size())]
    for step in range(STEPS):
        total = {}
        for rank, of_rank in enumerate(losses):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                value = loss(model, device, step, rank, micro)
                value.backward()
                of_rank.append(value.detach().cpu())
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = p.grad.clone() if name not in total else total[name] + p.grad
        for name, p in model.named_parameters():
            p.grad = total[name] / len(losses) if name in total else None
        optimizer.step()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def sharded_run(model, handle, optimizer, device, *, micro_batches=1, loss=rank_loss):
    rank = dist.get_rank()
    losses = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if last else handle.no_sync():
                value = loss(model, device, step, rank, micro)
                value.backward()
            losses.append(value.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(handle):
    """The gathered state, on every rank."""
    box = [handle.state_dict()]
    dist.broadcast_object_list(box)
    return box[0]


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(theirs)} differ: {different[:4]}"
