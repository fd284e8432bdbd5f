"""The extension module: thin bindings of the C++ library. Use what `neaptide` and `neaptide.sim` export."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

built_with_torch: str

class Error(RuntimeError): ...
class UserError(Error, ValueError): ...
class OutOfMemory(Error, torch.OutOfMemoryError): ...  # noqa: N818
class InternalError(Error): ...

class StepReport:
    """What the engine did since the report before, and whether it helped. Sizes are in bytes, times in nanoseconds."""

    passes: int
    saved_tensors: int
    kept_tensors: int
    saved_bytes: int
    offloaded_bytes: int
    offloaded_storages: int
    reloaded_bytes: int
    reloaded_storages: int
    late_reloads: int
    forwarded_unpacks: int
    exposed_wait_ns: int
    planned_drop: int
    measured_drop: int
    stayed_bytes: int
    still_referenced: dict[str, int]
    never_hit: list[str]
    device_peak: int | None
    allocated_at_turn: int | None
    peak_piece: str
    away_at_peak: int
    host_bytes: int
    host_locked: int
    host_locked_peak: int
    prefetch_window: int
    in_flight_window: int
    ratio: float
    def findings(self) -> list[str]:
        """What kept the peak from falling and what to do about it; empty when there is nothing to say."""

class HostCounters:
    """The host memory pool: bytes, and counts since it was made."""

    requested: int
    in_use: int
    in_flight: int
    idle: int
    locked: int
    locked_peak: int
    acquires: int
    hits: int
    refusals: int
    slab_allocations: int
    evictions: int
    pageable_slabs: int

class Unit:
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

class Scope:
    def close(self) -> None: ...

class Engine:
    def __init__(self, options: dict[str, Any]) -> None: ...
    def attach(
        self, model: int, units: Sequence[tuple[str, Unit]], list_tensors: Callable[[], Sequence[torch.Tensor]]
    ) -> None: ...
    def detach(self) -> None: ...
    def unit_names(self) -> list[str]: ...
    def take_step_report(self) -> StepReport: ...
    def host_counters(self) -> HostCounters: ...
    def open_scope(self) -> Scope: ...

def select_units(
    modules: Sequence[str], units: Sequence[str], layers: Sequence[str], patterns: Sequence[str]
) -> list[int]: ...

class _Sim:
    """The simulated device, for neaptide.sim."""

    @staticmethod
    def load() -> None: ...
    @staticmethod
    def configure(settings: Sequence[tuple[str, str]]) -> None: ...
    @staticmethod
    def device_count() -> int: ...
    @staticmethod
    def memory(device: int) -> dict[str, int]: ...
    @staticmethod
    def pinned_memory() -> dict[str, int]: ...
    @staticmethod
    def counters(device: int) -> dict[str, Any]: ...
    @staticmethod
    def reset_counters(device: int) -> None: ...
    @staticmethod
    def reset_peak(device: int) -> None: ...
    @staticmethod
    def host_time_ns(device: int) -> int: ...
    @staticmethod
    def take_hazards() -> list[str]: ...
    @staticmethod
    def default_generator(device: int) -> torch.Generator: ...

sim: _Sim
