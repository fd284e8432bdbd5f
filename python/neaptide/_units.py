"""Units made of the modules of a model: calls of such a module run inside a hook point of the library.

A module becomes a unit by a change of its class, to a subclass that differs in `__call__` alone. So what a unit
contains is everything that a call of the module does: other people's hooks, a checkpoint inside its `forward`, a
compiled version of it. Copies and pickles of the module are plain modules of the former class.
"""

from __future__ import annotations

import copyreg
import functools
from typing import TYPE_CHECKING, Any

import torch

from neaptide import _C

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_STATE = "_neaptide_unit"
_WRAPPED = "._checkpoint_wrapped_module"  # inside torch's checkpoint_wrapper


class _State:
    """What hangs at a module that is a unit: its hook point, and whoever uses it, kept alive by the module."""

    def __init__(self) -> None:
        self.unit = _C.Unit()
        self.users: list[object] = []

    def __reduce__(self) -> tuple[type[_State], tuple[()]]:
        # Of classes that copy their modules' dicts themselves: a copy is a unit that nobody uses.
        return (_State, ())


class _UnitModule:
    """Comes first among the bases of the class of a module that is a unit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().__call__  # type: ignore[misc]
        state = self.__dict__.get(_STATE)
        if state is None:
            return forward(*args, **kwargs)
        return state.unit.run(forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy has no hook points, hence no reason to be anything but what it was.
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        own, plain = type(self), type(self)._neaptide_plain  # type: ignore[attr-defined]
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _STATE}
        # Pickle has its own way with this function, and compares the class then.
        make = plain.__new__ if make is copyreg.__newobj__ else plain if make is own else make  # type: ignore[attr-defined]
        return (make, tuple(plain if arg is own else arg for arg in args), *rest)


@functools.cache
def _unit_class(plain: type) -> type:
    names = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_neaptide_plain": plain,
    }
    return type(plain)(plain.__name__, (_UnitModule, plain), names)


def acquire(module: torch.nn.Module, user: object) -> _C.Unit:
    """Makes the module a unit, if it is none yet, which it stays until `user` releases it."""
    state = module.__dict__.get(_STATE)
    if state is None:
        if not isinstance(module, _UnitModule):
            module.__class__ = _unit_class(type(module))
        state = module.__dict__[_STATE] = _State()
    state.users.append(user)
    return state.unit


def release(module: torch.nn.Module, user: object) -> None:
    """Undoes acquire(). The module gets its class back when nobody else uses it."""
    state = module.__dict__.get(_STATE)
    if state is None or user not in state.users:
        return
    state.users.remove(user)
    if state.users:
        return
    del module.__dict__[_STATE]
    # A class that somebody put in front of ours since (FSDP2 does that) stays, and ours with it, idle.
    plain = type(module).__dict__.get("_neaptide_plain")
    if plain is not None:
        module.__class__ = plain


def select(model: torch.nn.Module, patterns: Iterable[str | int], section: str) -> list[tuple[str, torch.nn.Module]]:
    """The chosen modules under their first names, each once. Errors begin with the section."""
    texts = [str(pattern) for pattern in ([patterns] if isinstance(patterns, (str, int)) else patterns)]
    modules, units = _named_modules(model)
    layer_classes = _no_split_classes(model)
    layers = [name for name in units if any(base.__name__ in layer_classes for base in type(modules[name]).__mro__)]
    # The wrapper, outside of the checkpoint: what is inside of it saves nothing.
    layers = [name.removesuffix(_WRAPPED) for name in layers]
    chosen: dict[int, tuple[str, torch.nn.Module]] = {}
    for index in _C.select_units(list(modules), units, layers, texts, section):
        module = modules[units[index]]
        chosen.setdefault(id(module), (units[index], module))
    return list(chosen.values())


def after(model: torch.nn.Module, chosen: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """What runs after the chosen modules and has work to do in backward, as far as the model's order tells."""
    modules, units = _named_modules(model)
    taken = {id(module) for _, module in chosen}
    indices = _C.units_after(units, [units.index(name) for name, _ in chosen])
    following = [(units[index], modules[units[index]]) for index in indices]
    return [pair for pair in following if id(pair[1]) not in taken and any(True for _ in pair[1].parameters())]


def _named_modules(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Module], list[str]]:
    """All modules by their names, and the names of those that can be units."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return modules, [name for name, module in modules.items() if name and not isinstance(module, CONTAINERS)]


def _no_split_classes(model: torch.nn.Module) -> set[str]:
    """Names of the classes that the model, or a part of it, says are its layers."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names
