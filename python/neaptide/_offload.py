"""Activation offload for any torch.nn.Module: nt.offload() and nt.offload_scope()."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from neaptide import _C, _units

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


class OffloadOptions(TypedDict, total=False):
    """The engine's options; what is left out has the default in brackets. Bytes are an int or a text like "64MiB"."""

    mode: Literal["async", "sync", "off"]
    """Overlap copies with compute [async], copy on the compute stream, or leave autograd alone."""
    device_budget: int | str
    """Saved activations that may stay on the device [0]; the rest leaves, farthest from its use first."""
    min_bytes: int | str
    """Smaller storages stay [1MiB]."""
    prefetch: int | str
    """How far ahead of its use a storage comes back: "automatic" [that], a number of units, or bytes ("64MiB")."""
    keep_last: int | None
    """So many units at the end of forward stay [None: one, or what automatic prefetch has learned]."""
    max_in_flight: int | str
    """Device bytes that may wait for their copies out [256MiB]."""
    device_limit: int | str | None
    """Device bytes in use above which nothing comes back ahead of its use; what is held back makes backward wait
    [None: no limit]."""
    host_cache_limit: int | str
    """Idle host bytes kept for reuse [4GiB]."""
    host_limit: int | str | None
    """All host bytes; at the limit a storage stays on the device [None: no limit]."""
    pin: bool
    """Page-locked host memory [True]."""
    policy: Callable[[torch.Tensor, str, str], str] | None
    """Asked for every saved tensor that could leave, with the unit's and the operator's name: "keep" or "offload"."""


class _Statistics:
    """What an engine tells about itself."""

    _engine: _C.Engine

    def take_step_report(self) -> _C.StepReport:
        """What happened since the last call. Call it when a step is over; it does not wait for the device."""
        return self._engine.take_step_report()

    def host_counters(self) -> _C.HostCounters:
        """The host memory pool as it is now."""
        return self._engine.host_counters()


class Offload(_Statistics):
    """Offload that is on for one model. The model keeps it, so it need not be kept by whoever made it.

    As a context manager it ends with the block.
    """

    def __init__(self, model: torch.nn.Module, modules: Iterable[str | int], options: OffloadOptions) -> None:
        self._engine = _C.Engine(dict(options))
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        chosen = _units.select(model, modules, "offload")
        try:
            units = [(name, self._acquire(module)) for name, module in chosen]
            after_units = [(name, self._acquire(module)) for name, module in _units.after(model, chosen)]
            self._engine.attach(id(model), units, _tensors_of(model), after_units)
        except BaseException:
            self.remove()
            raise

    def _acquire(self, module: torch.nn.Module) -> _C.Unit:
        unit = _units.acquire(module, self)
        self._modules.append(weakref.ref(module))
        return unit

    @property
    def units(self) -> list[str]:
        """The names of the modules that are units, in the order of the model; none after remove()."""
        return self._engine.unit_names()

    def remove(self) -> None:
        """Leaves forward passes alone from now on. Graphs that exist can still run backward. Idempotent."""
        self._engine.detach()
        for reference in self._modules:
            module = reference()
            if module is not None:
                _units.release(module, self)
        self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<neaptide.Offload of {len(self.units)} units>"


class OffloadScope(_Statistics):
    """What is saved inside a `with` block over it is offloaded. Make it once and enter it in every step: it learns.

    May be entered again, also inside itself and on several threads; each `with` block belongs to its thread.
    """

    def __init__(self, model: torch.nn.Module | None, options: OffloadOptions) -> None:
        self._engine = _C.Engine(dict(options))
        if model is not None:
            self._engine.attach(id(model), [], _tensors_of(model))
        self._local = threading.local()

    def __enter__(self) -> Self:
        self._open.append(self._engine.open_scope())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            raise _C.UserError(
                "[offload] expected a scope to be left on the thread that entered it; found it left on another, as a "
                "generator is that another thread closes; begin and end the `with` block on one thread"
            )
        self._open.pop().close()

    @property
    def _open(self) -> list[_C.Scope]:
        if not hasattr(self._local, "scopes"):
            self._local.scopes = []
        return self._local.scopes


def offload(model: torch.nn.Module, modules: Iterable[str | int] = (), **options: Unpack[OffloadOptions]) -> Offload:
    """Sends what autograd saves in the chosen modules to the host, and brings it back before backward needs it.

    Numbers never change, and nothing but memory and time does: names, state dicts, parameters and the optimizer stay
    as they are.

    Args:
        model: any module, on any device.
        modules: which of its modules are units. Each entry is a name (`model.layers.3`), a pattern
            (`model.layers.{*}`, `model.layers.*.mlp`), or an index or range of the model's layers (`5`, `"0-19"`).
            Empty: the layers, which are the modules of the classes in the model's `_no_split_modules` or, without
            that, its longest list of modules.
        options: see OffloadOptions.

    Returns:
        A handle with statistics and remove(). The model keeps it alive.

    Raises:
        UserError: an option is not valid, or an entry of `modules` matches nothing; nothing has changed then.
    """
    return Offload(model, modules, options)


def offload_scope(model: torch.nn.Module | None = None, **options: Unpack[OffloadOptions]) -> OffloadScope:
    """A context manager inside which everything that autograd saves is offloaded, whatever saves it.

    Args:
        model: its frozen parameters and buffers are known then, and never offloaded. (Parameters that are trained are
            known anyway.)
        options: see OffloadOptions.
    """
    return OffloadScope(model, options)


def _tensors_of(model: torch.nn.Module) -> Callable[[], list[torch.Tensor]]:
    """Lists what the model owns now; moving it to another device replaces all of that. Does not keep the model."""
    reference = weakref.ref(model)

    def list_tensors() -> list[torch.Tensor]:
        owner = reference()
        return [] if owner is None else [*owner.parameters(), *owner.buffers()]

    return list_tensors
