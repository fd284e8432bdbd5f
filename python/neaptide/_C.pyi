"""The extension module: thin bindings of the C++ library. Use what `neaptide` and `neaptide.sim` export."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

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
    needs_hooks: bool
    reads_no_parameters: bool
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

class Scope:
    def close(self) -> None: ...

class Engine:
    def __init__(self, options: dict[str, Any]) -> None: ...
    def attach(
        self,
        model: int,
        units: Sequence[tuple[str, Unit]],
        list_tensors: Callable[[], Sequence[torch.Tensor]],
        after_units: Sequence[tuple[str, Unit]] = (),
    ) -> None: ...
    def detach(self) -> None: ...
    def unit_names(self) -> list[str]: ...
    def take_step_report(self) -> StepReport: ...
    def host_counters(self) -> HostCounters: ...
    def open_scope(self) -> Scope: ...

def select_units(
    modules: Sequence[str], units: Sequence[str], layers: Sequence[str], patterns: Sequence[str], section: str
) -> list[int]: ...
def units_after(units: Sequence[str], chosen: Sequence[int]) -> list[int]: ...

class World:
    """The ranks of a process group."""

    rank: int
    size: int
    def __init__(
        self, group: ProcessGroup, prefix: str, one_host: bool, agent_store: bool, timeout_s: float
    ) -> None: ...
    def exchange(self, text: str) -> list[str]: ...
    def abandon(self, reason: str) -> None: ...
    def close(self) -> None: ...

class ShardUsage:
    """What sharding holds on this rank now, in bytes, and what it has done since it was made."""

    shards: int
    unsharded: int
    gradients: int
    reduced: int
    minimum: int
    padding: int
    copied: int
    gathers: int
    scatters: int
    live_units: int
    live_units_peak: int

class NoSync:
    def close(self) -> None: ...

_Units = Sequence[tuple[str, Unit, Sequence[tuple[str, torch.Tensor]]]]
_Pieces = Sequence[tuple[str, Sequence[int], int, int, torch.Tensor]]

def check_shardable(units: _Units, options: dict[str, Any]) -> None: ...

class Sharded:
    def __init__(self, world: World, replicate: int, units: _Units, options: dict[str, Any]) -> None: ...
    def grad_norm(self, p: float) -> float: ...
    def clip_grad_norm(self, max_norm: float, p: float) -> float: ...
    def no_sync(self) -> NoSync: ...
    def with_full_parameters(self, body: Callable[[], object], write_back: bool) -> None: ...
    def reshard(self) -> None: ...
    def shards(self) -> list[tuple[str, list[int], int, int, torch.Tensor]]: ...
    def check_shards(self, pieces: _Pieces) -> None: ...
    def load_shards(self, pieces: _Pieces) -> None: ...
    def full_state(self) -> dict[str, torch.Tensor]: ...
    def check_full_state(self, state: dict[str, torch.Tensor]) -> None: ...
    def load_full_state(self, state: dict[str, torch.Tensor]) -> None: ...
    def usage(self) -> ShardUsage: ...
    def reset_peak(self) -> None: ...
    def unit_names(self) -> list[str]: ...
    def dissolve(self) -> None: ...

def save_checkpoint(
    world: World, dir: str, step: int, keep_last: int, pieces: _Pieces, state: dict[str, str]
) -> None: ...

class CheckpointReader:
    def __init__(self, path: str) -> None: ...
    def tensors(self) -> dict[str, tuple[torch.dtype, list[int]]]: ...
    def load(self, world: World, pieces: _Pieces, may_stay: set[str]) -> None: ...

class _Sim:
    """The simulated device, for neaptide.sim."""

    @staticmethod
    def load() -> None: ...
    @staticmethod
    def settle_backward() -> None: ...
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
