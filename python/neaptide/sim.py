"""The simulated accelerator: a torch device named `sim`, with a module like `torch.cuda`.

Importing this module makes the device part of the process; `torch.sim` is then this module. It has to come before the
first backward pass of the process, in which autograd takes note of the devices. A process has one accelerator, so where
another one is available the import is refused.

    import neaptide.sim as sim

    sim.configure(capacity="512MiB", d2h="25GB/s", h2d="25GB/s")
    model.to("sim")

Memory has a hard capacity, copies between `sim` and page-locked host memory are asynchronous, results are those of the
CPU bit by bit, and times are those of the described device on a virtual clock.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from neaptide import _C

_sim = _C.sim
_sim.load()
_PROCESS = os.getpid()


@atexit.register
def _settle_backward() -> None:
    if not _is_in_bad_fork():
        _sim.settle_backward()


_Device = torch.device | str | int | None


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    named = torch.device("sim" if device is None else device)
    if named.type != "sim":
        raise ValueError(f"expected a sim device; found {named}")
    return current_device() if named.index is None else named.index


# ---- what the device is


def configure(**settings: Any) -> None:
    """Describes the device, before it is used first or while nothing is queued on it.

    The keys are those of the environment variable NEAP_SIM: capacity, pinned_capacity, d2h, h2d, peer, latency, gflops,
    hbm, kernel_min, launch, event, clock, realtime_copies, hazard_check, strict_free, poison. Values may be texts with
    a unit ("512MiB", "25GB/s", "5us"), numbers or booleans. How many devices there are is NEAP_SIM's to say alone,
    before the import: autograd has noted their number then.

    Raises:
        UserError: a key or value is not known.
    """
    if "count" in settings:
        raise _C.UserError(
            "[neaptide.sim.count] expected the number of devices in the environment, "
            f"NEAP_SIM=count={settings['count']}, before neaptide.sim is imported; found it here, when autograd has "
            "noted their number"
        )
    _sim.configure([(key, _text(value)) for key, value in settings.items()])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """There is nothing left to set up after the import."""


def device_count() -> int:
    return _sim.device_count()


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: _Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def get_device_name(device: _Device = None) -> str:
    return f"Neaptide simulated accelerator {_index(device)}"


class device(contextlib.ContextDecorator):  # noqa: N801
    """Makes a device the current one inside a `with` block; -1 leaves it as it is."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = torch._C._accelerator_exchangeDevice(self.idx)
        return self

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self.prev_idx)


class device_of(device):  # noqa: N801
    """Makes a tensor's device the current one, if that is a `sim`."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.device.type == "sim" else -1)


def synchronize(device: _Device = None) -> None:
    """Waits until everything queued on the device is done."""
    torch.accelerator.synchronize(_index(device))


# ---- streams and events


class _OfThisDevice(type):
    """Makes objects of torch's own class, which torch asks for by identity, and knows those on this device."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1]) and instance.device.type == "sim"


class Stream(torch.Stream, metaclass=_OfThisDevice):
    """A queue of work of its own. The default stream is the one that work goes to without any."""

    @staticmethod
    def _make(device: _Device = None, priority: int = 0, **identity: int) -> torch.Stream:
        if identity:
            return torch.Stream(**identity)
        return torch.Stream(torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event, metaclass=_OfThisDevice):
    """A point in a stream that others can wait for."""

    @staticmethod
    def _make(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Work of this thread goes to the stream inside the block; None leaves it where it is."""
    if stream is None:
        yield None
        return
    with stream:
        yield stream


# ---- memory


def memory_allocated(device: _Device = None) -> int:
    """Bytes of live tensors, rounded up as the allocator does."""
    return _sim.memory(_index(device))["current"]


def max_memory_allocated(device: _Device = None) -> int:
    return _sim.memory(_index(device))["peak"]


# The allocator keeps nothing back, so what is reserved is what is allocated.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Device = None) -> None:
    _sim.reset_peak(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes."""
    stats = _sim.memory(_index(device))
    return stats["capacity"] - stats["current"], stats["capacity"]


def memory_stats(device: _Device = None) -> dict[str, int]:
    """current, peak, requested, requested_peak, live_blocks, allocations, frees, out_of_memory, capacity."""
    return _sim.memory(_index(device))


def pinned_memory_stats() -> dict[str, int]:
    """The same of page-locked host memory, all devices together."""
    return _sim.pinned_memory()


def empty_cache() -> None:
    """The allocator keeps nothing back."""


# ---- what happened, on the virtual clock


def counters(device: _Device = None) -> dict[str, Any]:
    """Copies and bytes per link, kernels, stalls; since the start or the last reset_counters(). Times in ns."""
    return _sim.counters(_index(device))


def reset_counters(device: _Device = None) -> None:
    _sim.reset_counters(_index(device))


def host_time_ns(device: _Device = None) -> int:
    """Where the host is on the device's clock."""
    return _sim.host_time_ns(_index(device))


def take_hazards() -> list[str]:
    """What the hazard checker (`configure(hazard_check=True)`) has found since the last call."""
    return _sim.take_hazards()


# ---- random numbers


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        if not 0 <= index < device_count():
            raise IndexError(index)
        return _sim.default_generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generators[index].manual_seed(seed)


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: _Device = "sim") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = "sim") -> None:
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- what torch asks a device module


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    del including_emulation
    return True


def _is_in_bad_fork() -> bool:
    """The device's threads, and autograd's, stayed in the process that this one was forked from."""
    return os.getpid() != _PROCESS


def _lazy_init() -> None:
    """Called by torch before it uses a device."""


def _refuse_after_backward() -> None:
    """Autograd makes a queue for each device in the first backward pass, and has none for devices that come later."""
    number: list[int] = []  # passes count from zero
    probe = torch.zeros((), requires_grad=True)
    probe.register_hook(lambda _: number.append(torch._C._current_graph_task_id()))
    with torch.inference_mode(False), torch.enable_grad():
        (probe * 1).backward()
    if number != [0]:
        raise _C.UserError(
            "[neaptide.sim] expected to be imported before the first backward pass of the process, in which autograd "
            f"takes note of the devices; found that {number[0]} have run; import neaptide.sim first"
        )


def _register() -> None:
    if torch._C._get_privateuse1_backend_name() != "sim":
        raise RuntimeError("expected the device sim to be registered; found another one in its place")
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _refuse_after_backward()


if not hasattr(torch, "sim"):
    _register()
