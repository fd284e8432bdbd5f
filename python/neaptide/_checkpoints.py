"""Checkpoints of a sharded model and its optimizer, in the library's own format: docs/checkpoints.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from neaptide import _C

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# As `neap train` names them (neap/train/checkpoints.h).
_PARAMETER, _BUFFER, _OPTIMIZER = "parameter.", "buffer.", "optimizer."
_FOREIGN = ("rank.", _BUFFER)  # what a model need not have
# What torch's optimizers remember, and neap's, by the same names. Those of others take what there is.
_MOMENTS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_REMEMBERED = {torch.optim.AdamW: _MOMENTS, torch.optim.Adam: _MOMENTS, torch.optim.SGD: {"momentum_buffer"}}


class Entry(NamedTuple):
    """A piece of a tensor, as the library takes it."""

    name: str
    full_size: list[int]
    begin: int
    end: int
    data: torch.Tensor


def entries_of(core: _C.Sharded, buffers: Mapping[str, torch.Tensor]) -> list[Entry]:
    """This rank's pieces of the parameters, which lie in their memory, and the buffers."""
    entries = [Entry(_PARAMETER + name, *rest) for name, *rest in core.shards()]
    return entries + [_whole(_BUFFER + name, buffer) for name, buffer in buffers.items()]


def optimizer_entries(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Entry], name_of: Callable[[torch.Tensor], str | None]
) -> list[Entry]:
    """What the optimizer remembers of each parameter: tensors of its shape, and numbers."""
    pieces = {entry.name: entry for entry in parameters}
    entries = []
    for parameter, name in _named(optimizer, name_of):
        for what, value in optimizer.state.get(parameter, {}).items():
            key = f"{_OPTIMIZER}{what}.{name}"
            if not isinstance(value, torch.Tensor) or value.shape not in (parameter.shape, torch.Size()):
                raise _C.UserError(
                    "[checkpoint] expected an optimizer that remembers tensors of a parameter's shape, and numbers as "
                    f"tensors; found '{what}' of '{name}': {_found(value)}; save its state with torch.save()"
                )
            whole = pieces[_PARAMETER + name]
            entries.append(whole._replace(name=key, data=value) if value.ndim else _whole(key, value))
    return entries


class Loading:
    """A checkpoint on its way into a model. Whether it fits is known before anything changes."""

    def __init__(self, path: str, model: list[Entry], buffers: Mapping[str, torch.Tensor]) -> None:
        self._reader = _C.CheckpointReader(path)
        self._tensors = self._reader.tensors()
        self._model = model
        self._entries = list(model)
        flat = {entry.name: entry.data for entry in model}
        self._buffers = [(buffer, flat[_BUFFER + name]) for name, buffer in buffers.items()]
        self._optimizer: torch.optim.Optimizer | None = None
        self._states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def into(self, optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str | None]) -> None:
        """What the checkpoint knows of the optimizer's parameters is loaded, too."""
        self._optimizer = optimizer
        pieces = {entry.name: entry for entry in self._model}
        saved: dict[str, list[tuple[str, torch.dtype]]] = {}
        for key, (dtype, _) in self._tensors.items():
            if key.startswith(_OPTIMIZER):
                what, name = key.removeprefix(_OPTIMIZER).split(".", 1)
                saved.setdefault(name, []).append((what, dtype))
        if not saved:
            raise _C.UserError("[checkpoint] expected the state of an optimizer; found none in the checkpoint")
        _check_kind(optimizer, {what for entries in saved.values() for what, _ in entries})
        for group in optimizer.param_groups:
            numbers_on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                name = _name(parameter, name_of)
                state = self._states[parameter] = {}
                for what, dtype in saved.get(name, ()):
                    key, whole = f"{_OPTIMIZER}{what}.{name}", pieces[_PARAMETER + name]
                    if what == "step":
                        device = parameter.device if numbers_on_device else "cpu"
                        state[what] = torch.zeros((), dtype=dtype, device=device)
                        self._entries.append(_whole(key, state[what]))
                    else:
                        state[what] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                        self._entries.append(whole._replace(name=key, data=state[what]))

    def load(self, world: _C.World) -> None:
        """Collective."""
        asked = {entry.name for entry in self._entries}
        foreign = _FOREIGN if self._optimizer is not None else (*_FOREIGN, _OPTIMIZER)
        may_stay = {name for name in self._tensors if name.startswith(foreign)} - asked
        self._reader.load(world, self._entries, may_stay)
        with torch.no_grad():
            for buffer, flat in self._buffers:
                buffer.copy_(flat.view(buffer.shape))
        if self._optimizer is not None:
            self._optimizer.state.update(self._states)


def _check_kind(optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    expected = _REMEMBERED.get(type(optimizer), saved)
    if not saved <= expected:
        raise _C.UserError(
            f"[checkpoint] expected what {type(optimizer).__name__} remembers ({', '.join(sorted(expected))}); found "
            f"{', '.join(sorted(saved))}; load it with an optimizer like the one that was saved"
        )


def _named(
    optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str | None]
) -> list[tuple[torch.Tensor, str]]:
    return [(p, _name(p, name_of)) for group in optimizer.param_groups for p in group["params"]]


def _name(parameter: torch.Tensor, name_of: Callable[[torch.Tensor], str | None]) -> str:
    name = name_of(parameter)
    if name is None:
        raise _C.UserError(
            "[checkpoint] expected an optimizer of the sharded model's parameters; found one of shape "
            f"{tuple(parameter.shape)} that is none of them"
        )
    return name


def _whole(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, list(tensor.shape), 0, tensor.numel(), tensor.detach().reshape(-1))


def _found(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
