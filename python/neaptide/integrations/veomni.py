"""Stands in for `veomni.distributed.async_offload`, as of VeOmni 0.1.12: the same calls, this engine.

    from neaptide.integrations.veomni import apply_async_activation_offload, reset_async_activation_offload

Differences: everything that the chosen modules save is offloaded, not only the hidden states that come in; an entry
that matches no module is an error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import neaptide

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

_logger = logging.getLogger("neaptide")
_offloads: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[neaptide.Offload]]]
_offloads = weakref.WeakKeyDictionary()


def apply_async_activation_offload(
    model: torch.nn.Module,
    activation_offload_modules: Iterable[str],
    host_cache_limit_bytes: int = 4 * 1024**3,
    **options: Unpack[neaptide.OffloadOptions],
) -> None:
    """Offloads what the chosen modules save.

    Args:
        model: the model, wrapped or not.
        activation_offload_modules: patterns such as `model.layers.{*}`; none: the model's layers.
        host_cache_limit_bytes: idle host bytes kept for reuse; 0 keeps none.
        options: further ones, see `neaptide.OffloadOptions`.

    Raises:
        neaptide.UserError: as `neaptide.offload()`.
    """
    offload = neaptide.offload(
        model, activation_offload_modules or (), host_cache_limit=host_cache_limit_bytes, **options
    )
    _offloads.setdefault(model, []).append(weakref.ref(offload))


def reset_async_activation_offload(model: torch.nn.Module) -> None:
    """To be called before a step, as VeOmni's trainer does. Does nothing to a model without offload.

    There is nothing to discard: what a failed step leaves goes with its graph. So this only begins the statistics of
    the next step; those of the last go to the logger `neaptide`, at level DEBUG.
    """
    for reference in _offloads.get(model, []):
        offload = reference()
        if offload is not None:
            report = offload.take_step_report()
            _logger.debug("%s", report)
