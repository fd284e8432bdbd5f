"""Scenarios of shard_ranks.py about what a sharded model's state is, and where it goes."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from shard_training import adamw, assert_same_state, placed, rank_loss, sharded_run, whole
from training import Chain, llama

import neaptide as nt


def state_dicts(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    for tied in (False, True):
        plain = llama(tie_word_embeddings=tied)
        model = placed(device, tie_word_embeddings=tied)
        handle = nt.fully_shard(model)
        full = handle.state_dict()
        assert list(full) == (list(plain.state_dict()) if rank == 0 else [])
        assert_same_state(whole(handle), plain.state_dict())

        sharded_run(model, handle, adamw(model), device)
        trained = whole(handle)
        plain.load_state_dict(trained)  # plain torch takes it
        copied = {name: _copied(piece) for name, piece in handle.state_dict(sharded=True).items()}
        handle.load_state_dict(llama(tie_word_embeddings=tied).state_dict())
        assert_same_state(whole(handle), llama(tie_word_embeddings=tied).state_dict())
        handle.load_state_dict(copied)  # pieces of the same ranks
        assert_same_state(whole(handle), trained)

        # Through files, into other pieces.
        with shared_folder() as folder:
            torch.save(copied, Path(folder) / f"{rank}.pt")
            dist.barrier()
            with torch.serialization.safe_globals([nt.ShardPiece]):
                saved = [torch.load(Path(folder) / f"{r}.pt") for r in range(world)]
        other = placed(device, tie_word_embeddings=tied)
        cut_else = nt.fully_shard(other, units=["0-1"])
        cut_else.load_state_dict(saved)
        assert_same_state(whole(cut_else), trained)
        before = rank_loss(model, device, 0, 0)
        assert torch.equal(rank_loss(other, device, 0, 0), before)
        assert torch.equal(rank_loss(plain.to(device), device, 0, 0), before)


def _copied(piece):
    return piece._replace(data=piece.data.clone()) if isinstance(piece, nt.ShardPiece) else piece.clone()


def wrong_states(device):
    """Each is a UserError on every rank, and changes nothing."""
    rank = dist.get_rank()
    handle = nt.fully_shard(model := placed(device))
    state = llama().state_dict()
    for wrong, text in (
        ({}, "missing, such as 'lm_head.weight'"),
        (state | {"extra": torch.ones(1)}, "1 unknown, such as 'extra'"),
        (state | {"lm_head.weight": torch.ones(2, 2)}, "expected 'lm_head.weight' of shape [128, 64]; found [2, 2]"),
        (state | {"lm_head.weight": None}, "'lm_head.weight' to be a plain tensor with values; found a NoneType"),
        (state | {"lm_head.weight": state["lm_head.weight"].to("meta")}, "found a Tensor on meta; make a whole"),
    ):
        for given in (wrong, wrong if rank == 1 else state):
            try:
                handle.load_state_dict(given)
            except nt.UserError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"no error: {text}")
    assert_same_state(whole(handle), state)
    sharded_run(model, handle, adamw(model), device)


def checkpoints(device):
    """Model and optimizer through the library's checkpoints, into other pieces; then both go on with the same bits."""
    rank = dist.get_rank()
    model = llama().to(device)
    handle = nt.fully_shard(model)
    optimizer = adamw(model)
    sharded_run(model, handle, optimizer, device)
    with shared_folder() as folder:
        handle.save_checkpoint(folder, 5, optimizer=optimizer)
        other = placed(device)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        cut_else = nt.fully_shard(other, units=["0-1"], comm_fusion=False)
        fresh = adamw(other)
        cut_else.load_checkpoint(folder, optimizer=fresh)
        assert_same_state(whole(cut_else), whole(handle))
        assert len(fresh.state) == len(list(other.parameters()))
        expected = sharded_run(model, handle, optimizer, device)
        assert sharded_run(other, cut_else, fresh, device) == expected
        assert_same_state(whole(cut_else), whole(handle))

        # The model alone, into the same pieces; and what cannot be.
        handle.load_checkpoint(Path(folder) / "step-00000005")
        for arguments, text in (
            ((Path(folder) / "nowhere",), "nowhere"),
            ((folder if rank == 0 else Path(folder) / "nowhere",), "nowhere"),
        ):
            try:
                handle.load_checkpoint(*arguments)
            except nt.UserError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"no error: {text}")
        narrow = nt.fully_shard(placed(device, intermediate_size=128))
        try:
            narrow.load_checkpoint(folder)
        except nt.UserError as error:
            assert "misshapen: parameter.model.layers.0.mlp.down_proj.weight" in str(error), error
        else:
            raise AssertionError("a checkpoint of another model")


@contextlib.contextmanager
def shared_folder():
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def buffers(device):
    """A model with buffers, and parameters that the ranks do not divide, or that are fewer than they:
    https://github.com/pytorch/torchtitan/pull/4593, https://github.com/pytorch/torchtitan/issues/764."""

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
            self.norm = torch.nn.BatchNorm1d(3)
            self.scale = torch.nn.Parameter(torch.tensor(2.0))
            self.seen = torch.zeros(2)

        def get_extra_state(self):
            return self.seen.clone()

        def set_extra_state(self, state):
            self.seen = state

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) * self.scale

    model = Small().to(device)
    handle = nt.fully_shard(model)
    assert handle.units == ["layers.0", "layers.1", ""]
    model(torch.ones(4, 3, device=device)).sum().backward()
    state = whole(handle)
    assert list(state) == list(Small().state_dict())
    assert state["norm.num_batches_tracked"] == 1
    handle.load_state_dict(Small().state_dict() | {"_extra_state": torch.ones(2)})
    assert model.seen.sum() == 2
    handle.load_state_dict(Small().state_dict())
    assert_same_state(whole(handle), Small().state_dict())
    assert model.norm.num_batches_tracked == 0

    # Statistics that each rank has of its own: a checkpoint has all of them of one rank.
    statistics = (model.norm.running_mean, model.norm.running_var)
    for value in statistics:
        value.fill_(1 + dist.get_rank())
    with shared_folder() as folder:
        model.seen.fill_(7)
        handle.save_checkpoint(folder, 1)
        model.seen.zero_()
        handle.load_checkpoint(folder)
    assert all(torch.equal(value, torch.ones_like(value)) for value in statistics), statistics
    assert model.seen.sum() == 14


def meta(device):
    with torch.device("meta"):
        model = Chain()
    model_on_device = Chain()
    values = dict(model_on_device.named_parameters())
    with torch.no_grad():
        handle = nt.fully_shard(model, device=device, initialize=lambda name, full: full.copy_(values[name]))
    assert {p.device.type for p in model.parameters()} == {device}
    assert_same_state(whole(handle), model_on_device.state_dict())
    rows = nt.fully_shard(Chain(), block_of=lambda _, shape: shape[-1])
    assert all(piece.begin % 32 == 0 for piece in rows.state_dict(sharded=True).values())


def from_neap(device):
    """A checkpoint of `neap train`, with the moments of its AdamW; and one of ours for `neap checkpoint`."""
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    run = Path(os.environ["NEAP_RUN"])
    model = AutoModelForCausalLM.from_pretrained(run / "model").to(device)
    handle = nt.fully_shard(model)
    optimizer = adamw(model)
    handle.load_checkpoint(run / "out" / "checkpoints", optimizer=optimizer)
    state = whole(handle)
    for name, value in load_file(run / "out" / "hf" / "model.safetensors").items():
        assert torch.equal(state[name], value), name
    assert {s["step"].item() for s in optimizer.state.values()} == {3}
    try:
        handle.load_checkpoint(run / "out" / "checkpoints", optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    except nt.UserError as error:
        assert "expected what SGD remembers (momentum_buffer); found exp_avg, exp_avg_sq, step" in str(error), error
    else:
        raise AssertionError("moments of AdamW for SGD")
    assert all(s["exp_avg"].abs().sum() > 0 for s in optimizer.state.values() if s["exp_avg"].numel() > 0)
    sharded_run(model, handle, optimizer, device)
    handle.save_checkpoint(run / "ours", 8, optimizer=optimizer)
