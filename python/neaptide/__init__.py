"""The memory engine for training large models: sends what autograd saves to the host while it is not needed.

    import neaptide as nt

    nt.offload(model)  # any torch.nn.Module: its layers' saved tensors now wait on the host
    ...                # train as before

`neaptide.sim` is a simulated accelerator, on which all of this runs without a GPU. `python -m neaptide` has tools for
what the `neap` command reads and leaves.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from neaptide._torch import check_torch

if TYPE_CHECKING:
    from neaptide._C import Error, HostCounters, InternalError, OutOfMemory, ShardUsage, StepReport, UserError
    from neaptide._offload import Offload, OffloadOptions, OffloadScope, offload, offload_scope
    from neaptide._shard import Sharded, ShardOptions, ShardPiece, fully_shard

__all__ = [
    "Error",
    "HostCounters",
    "InternalError",
    "Offload",
    "OffloadOptions",
    "OffloadScope",
    "OutOfMemory",
    "ShardOptions",
    "ShardPiece",
    "ShardUsage",
    "Sharded",
    "StepReport",
    "UserError",
    "fully_shard",
    "offload",
    "offload_scope",
]

# A source tree of which nothing is built has the tools alone.
_BUILT = find_spec("neaptide._built_with") is not None
if _BUILT:
    from neaptide import _built_with

    __version__ = _built_with.VERSION
    check_torch(__version__, _built_with.TORCH)


def __getattr__(name: str) -> object:
    """Loads the engine, and torch with it, when it is first asked for: the tools need neither."""
    if name not in __all__:
        raise AttributeError(f"module 'neaptide' has no attribute '{name}'")
    if not _BUILT:
        raise ImportError(
            f"neaptide.{name}: expected an installed or built package; found the files of a source tree, {__file__}; "
            "install it (pip install . --no-build-isolation), or build it (make build) and use build/dev/python"
        )
    homes = (import_module(f"neaptide.{home}") for home in ("_offload", "_shard", "_C"))
    value = globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
    return value
