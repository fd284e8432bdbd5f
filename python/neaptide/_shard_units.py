"""Which modules of a model are units of sharding, and which parameters are theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from neaptide import _C, _units

if TYPE_CHECKING:
    from collections.abc import Iterable

Parameters = list[tuple[str, torch.Tensor]]


def plan_units(model: torch.nn.Module, patterns: Iterable[str | int]) -> list[tuple[str, torch.nn.Module, Parameters]]:
    """The units with the parameters of which each is the innermost around them, the root last."""
    given = [patterns] if isinstance(patterns, (str, int)) else list(patterns)
    chosen = _units.select(model, given, "shard")
    if not given:
        chosen = _with_units_beside(model, chosen)
    plan: list[tuple[str, torch.nn.Module, Parameters]] = [(name, module, []) for name, module in chosen]
    plan.append(("", model, []))
    unit_of = {id(module): index for index, (_, module, _) in enumerate(plan)}

    def visit(prefix: str, module: torch.nn.Module, owner: int) -> None:
        owner = unit_of.get(id(module), owner)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _check_parameter(prefix + name, parameter)
                plan[owner][2].append((prefix + name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise _C.UserError(
                    f"[shard] expected buffers with memory; found '{prefix}{name}' on the meta device; make it on its "
                    "device before fully_shard()"
                )
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{name}.", child, owner)

    visit("", model, len(plan) - 1)
    return plan


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    kind = type(parameter).__name__
    if torch.nn.parameter.is_lazy(parameter):
        raise _C.UserError(f"[shard] expected parameters with a shape; found that '{name}' is a {kind}; run it once")
    if is_traceable_wrapper_subclass(parameter):
        raise _C.UserError(
            f"[shard] expected plain tensors; found that '{name}' is a {kind}; shard a model that nothing else shards "
            "or wraps"
        )
    if parameter._post_accumulate_grad_hooks:
        raise _C.UserError(
            f"[shard] expected no post-accumulate hooks, in whose place sharding puts its own; found one at '{name}'; "
            "use Tensor.register_hook() instead"
        )
    # Else hooks that come later would join those that were, which torch no longer calls.
    parameter._post_accumulate_grad_hooks = None


def _with_units_beside(
    model: torch.nn.Module, layers: list[tuple[str, torch.nn.Module]]
) -> list[tuple[str, torch.nn.Module]]:
    """The outermost modules that neither lie in a layer nor contain one, with a matrix, and no tied parameter.

    Such as an embedding and an output head. A norm alone is not worth a gather; it stays with the root.
    """
    modules = dict(model.named_modules())
    uses: dict[int, int] = {}
    for module in modules.values():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    chosen = dict(layers)
    for name, module in modules.items():
        own = list(module.parameters())
        beside = name and not any(_related(name, other) for other in chosen)
        alone = all(uses[id(parameter)] == 1 for parameter in own)
        if beside and alone and any(p.ndim > 1 for p in own) and not isinstance(module, _units.CONTAINERS):
            chosen[name] = module
    return [(name, module) for name, module in modules.items() if name in chosen]


def _related(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def is_plain_embedding(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.Embedding)
        and type(module).forward is torch.nn.Embedding.forward
        and module.max_norm is None
        and [name for name, _ in module.named_parameters()] == ["weight"]
    )
