"""The ranks that torch.distributed has brought together, and what they have to agree on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from neaptide import _C

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.World] = weakref.WeakKeyDictionary()
_open_worlds: list[_C.World] = []
_worlds_by_name: dict[str, int] = {}


def place(mesh: DeviceMesh | dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, list[str]]:
    """The group of ranks and the number of copies in it; or all ranks, and what is wrong with the mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise _C.UserError(
            "[shard] expected torch.distributed to be initialised; found that it is not; start the ranks with "
            "torchrun, and call torch.distributed.init_process_group() first"
        )
    everybody = dist.group.WORLD
    assert everybody is not None
    if mesh is None:
        return everybody, 1, []
    if isinstance(mesh, dist.ProcessGroup):
        return mesh, 1, []
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor):
        found = f"{mesh!r}; give it a mesh that this rank belongs to"
    elif ranks.ndim == 1 and dist.get_rank() in ranks.tolist():
        return mesh.get_group(), 1, []
    elif ranks.ndim == 2 and ranks.flatten().tolist() == list(range(dist.get_world_size())):
        return everybody, ranks.shape[0], []
    else:
        found = f"one of shape {tuple(ranks.shape)} over ranks {ranks.flatten().tolist()}"
    expected = (
        "[shard.mesh] expected None, a process group, or a DeviceMesh with this rank in it, of one dimension, or of "
        f"two (copies × pieces) over all {dist.get_world_size()} ranks in order; found "
    )
    return everybody, 1, [expected + found]


def world_of(group: dist.ProcessGroup, timeout: float) -> _C.World:
    """The ranks of a process group, connected once."""
    world = _worlds.get(group)
    if world is None:
        number = _worlds_by_name.get(group.group_name, 0)
        _worlds_by_name[group.group_name] = number + 1
        world = _C.World(
            group,
            prefix=f"neaptide/{number}",
            one_host=_on_one_host(),
            agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            timeout_s=timeout,
        )
        _worlds[group] = world
        if not _open_worlds:
            atexit.register(_leave)
        _open_worlds.append(world)
    return world


def _on_one_host() -> bool:
    """Nothing but loopback is needed then."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE")
    if ranks_here is not None:
        return ranks_here == os.environ.get("WORLD_SIZE")
    return os.environ.get("MASTER_ADDR") in {"127.0.0.1", "localhost", "::1"}


def _leave() -> None:
    """The end of the process: waits for the others after a regular run, and else tells them why this rank leaves."""
    error = getattr(sys, "last_value", None)
    for world in _open_worlds:
        if error is not None:
            world.abandon(f"{type(error).__name__}: {error}")
            continue
        try:
            world.close()
        except _C.Error as failure:
            logging.getLogger("neaptide").debug("%s", failure)


def agree(world: _C.World, error: Sequence[str], description: str = "") -> None:
    """A UserError on every rank where one of them has an error, or where they describe different things."""
    texts = world.exchange(f"{error[0]}\0" if error else f"\0{description}")
    parts = [text.split("\0", 1) for text in texts]
    errors = [failed for failed, _ in parts]
    own = errors[world.rank]
    if own:
        raise _C.UserError(own)
    for rank, failed in enumerate(errors):
        if failed:
            raise _C.UserError(f"{failed} (so says rank {rank})")
    first = parts[0][1]
    for rank, (_, other) in enumerate(parts):
        if other != first:
            ours, theirs = _first_difference(first, other)
            raise _C.UserError(
                "[shard] expected every rank to shard the same model in the same way; found "
                f"'{ours}' on rank 0 and '{theirs}' on rank {rank}; give all ranks the same model, mesh and options"
            )


def _first_difference(first: str, other: str) -> tuple[str, str]:
    ours, theirs = [*first.split("\n"), ""], [*other.split("\n"), ""]
    return next((a, b) for a, b in zip(ours, theirs, strict=False) if a != b)
