"""Stands in for the swap half of `hyper_parallel.core.activation_checkpoint`: the same calls, this engine.

    from neaptide.integrations.hyperparallel import CheckpointPolicy, SwapManager, swap_wrapper

    for i, layer in enumerate(model.layers):
        model.layers[i] = swap_wrapper(layer)

Call shapes: https://gitcode.com/mindspore/hyper-parallel/blob/master/docs/guide/activation_checkpoint.md

Differences: a wrapped module is the module itself, so names of parameters stay; all that is wrapped has one engine
together, which learns the order of units from step to step; tensors under 1 MiB stay, unless
`SwapManager().set_options(min_bytes=0)` says otherwise.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from neaptide import _C, UserError, _units
from neaptide._offload import OffloadOptions, _Statistics

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_Wrapped = TypeVar("_Wrapped", bound=Callable[..., Any])
_Policy = Callable[[torch.Tensor], enum.Enum]


class CheckpointPolicy(enum.Enum):
    """What a policy may answer for a tensor. HyperParallel's own is taken as well, by its names."""

    MUST_SAVE = "keep"
    PREFER_SAVE = "keep"
    MUST_SWAP = "offload"


_ANSWERS = {"SAVE": "keep", "SWAP": "offload"} | {
    name: member.value for name, member in CheckpointPolicy.__members__.items()
}


class _Swapped:
    """Something wrapped: a module, or a function made of another one. Does not keep it alive."""

    def __init__(self, target: Callable[..., Any], name: str, unit: _C.Unit, policy: _Policy | None) -> None:
        self.reference = weakref.ref(target)
        self.name = name
        self.unit = unit
        self.policy = policy

    def tensors(self) -> list[torch.Tensor]:
        target = self.reference()
        return [*target.parameters(), *target.buffers()] if isinstance(target, torch.nn.Module) else []


class SwapManager(_Statistics):
    """What is wrapped in this process, and its engine. Every call of the class gives the same object."""

    _only: SwapManager | None = None
    _swapped: list[_Swapped]
    _options: OffloadOptions
    _count: int

    def __new__(cls) -> Self:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only._swapped = []
            cls._only._options = {}
            cls._only._count = 0
            cls._only._engine = _C.Engine({})
        return cls._only

    def set_options(self, **options: Unpack[OffloadOptions]) -> None:
        """Options of the engine, in place of those before. Those that count units come when all is wrapped."""
        if "policy" in options:
            raise UserError("[hyperparallel.policy] expected policies as policy_fn of swap_wrapper(); found one here")
        self._engine = self._make_engine(options)
        self._options = options

    def set_forward_prefetch_layer(self, first_layer: torch.nn.Module, second_layer: torch.nn.Module) -> None:
        """Says that the second layer runs after the first. The engine sees that by itself; this checks the layers.

        Raises:
            UserError: one of them neither is wrapped nor contains something that is.
        """
        wrapped = {id(swapped.reference()) for swapped in self._swapped}
        for layer in (first_layer, second_layer):
            if not any(id(module) in wrapped for module in layer.modules()):
                raise UserError(
                    "[hyperparallel.set_forward_prefetch_layer] expected layers that swap_wrapper() has wrapped, or "
                    f"parts of; found {type(layer).__name__}, in which nothing is"
                )

    def _add(self, target: Callable[..., Any], unit: _C.Unit, policy: _Policy | None) -> None:
        former = next((swapped for swapped in self._swapped if swapped.reference() is target), None)
        if former is not None:
            former.policy = policy
        else:
            kind = type(target) if isinstance(target, torch.nn.Module) else target
            self._swapped.append(_Swapped(target, f"{kind.__qualname__}.{self._count}", unit, policy))
            self._count += 1
        self._engine = self._make_engine(self._options)

    def _make_engine(self, options: OffloadOptions) -> _C.Engine:
        """One for everything that is alive. Wrapping is over before the first step, so nothing is lost by a new one."""
        self._swapped = [swapped for swapped in self._swapped if swapped.reference() is not None]
        swapped = list(self._swapped)
        policies = {each.name: each.policy for each in swapped if each.policy is not None}
        engine = _C.Engine({**options, "policy": functools.partial(_decide, policies)} if policies else dict(options))
        if swapped:
            units = [(each.name, each.unit) for each in swapped]
            engine.attach(id(self), units, lambda: [tensor for each in swapped for tensor in each.tensors()])
        self._engine.detach()
        return engine


def swap_wrapper(module: _Wrapped, policy_fn: _Policy | None = None) -> _Wrapped:
    """Offloads what the module saves in its forward.

    Args:
        module: a module, which is returned as it is, or a function, of which a wrapped one is returned.
        policy_fn: asked for each tensor that could leave: MUST_SWAP, or MUST_SAVE for one that stays.
    """
    manager = SwapManager()
    if isinstance(module, torch.nn.Module):
        manager._add(module, _units.acquire(module, manager), policy_fn)
        return module
    if not callable(module):
        raise UserError(f"[hyperparallel.swap_wrapper] expected a module or a function; found {module!r}")
    unit = _C.Unit()

    @functools.wraps(module)
    def swapped(*args: Any, **kwargs: Any) -> Any:
        return unit.run(module, args, kwargs)

    manager._add(swapped, unit, policy_fn)
    return swapped  # type: ignore[return-value]


def _decide(policies: dict[str, _Policy], tensor: torch.Tensor, unit: str, _op: str) -> str:
    policy = policies.get(unit)
    if policy is None:
        return "offload"
    answer = policy(tensor)
    name = getattr(answer, "name", None)
    if name not in _ANSWERS:
        raise UserError(f"[hyperparallel.policy_fn] expected MUST_SAVE or MUST_SWAP; found {answer!r}")
    return _ANSWERS[name]
