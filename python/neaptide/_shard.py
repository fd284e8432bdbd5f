"""Parameters, gradients and optimizer state in pieces over ranks, for any torch.nn.Module: nt.fully_shard()."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from neaptide import _C, _units
from neaptide._checkpoints import Entry, Loading, entries_of, optimizer_entries
from neaptide._ranks import agree, place, world_of
from neaptide._shard_units import Parameters, is_plain_embedding, plan_units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


class ShardOptions(TypedDict, total=False):
    """How a model is sharded; what is left out has the default in brackets. Bytes are an int or a text like "64MiB"."""

    comm_fusion: bool
    """One gather and one scatter for the parameters of a unit [True], or one for each parameter."""
    bucket_limit: int | str
    """Full parameters that one gather may move [0: no limit]."""
    stage: Literal["optim", "optim_grads", "optim_grads_params"]
    """What is in pieces within a step, too; the last is [that]. Between steps everything always is."""
    prefetch: bool
    """Gather the next unit while one computes, and reduce the last one's gradients meanwhile [True]."""
    reduce_op: Literal["avg", "sum"]
    """Of the gradients of all ranks ["avg"]."""
    gradient_factor: float
    """They are multiplied by it then [1]."""
    param_dtype: torch.dtype | None
    """Full parameters are held and sent in it [None: their own]; the pieces keep their dtype."""
    reduce_dtype: torch.dtype | None
    """Full gradients are held and sent in it [None: param_dtype]."""
    output_dtype: torch.dtype | None
    """Floating-point tensors that the model returns are cast to it [None: no cast]."""
    block_of: Callable[[str, tuple[int, ...]], int] | None
    """Of a parameter's name and shape: how many elements must stay together on one rank [None: cut anywhere]."""
    device: torch.device | str | None
    """Where parameters go that are on the meta device [None: there may be none]."""
    initialize: Callable[[str, torch.Tensor], None] | None
    """Fills such a parameter, whole, on every rank alike [None: zeros, until something is loaded]."""


class ShardPiece(NamedTuple):
    """A rank's piece of one parameter: a range of its elements, flattened in the order of memory."""

    full_size: tuple[int, ...]
    begin: int
    end: int
    data: torch.Tensor


class Sharded:
    """A model in pieces over ranks. The model keeps it, so it need not be kept by whoever made it.

    What is called collective is called on every rank, or the others wait for it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: DeviceMesh | dist.ProcessGroup | None,
        units: Iterable[str | int],
        timeout: float,
        options: ShardOptions,
    ) -> None:
        self._model = weakref.ref(model)
        self._modules: list[tuple[weakref.ref[torch.nn.Module], _C.Unit]] = []
        self._output_hook: Any = None
        group, replicate, error = place(mesh)
        self._world = world_of(group, timeout)
        self._replicate = replicate
        try:
            parts, description = self._prepare(model, units, options, error)
            agree(self._world, error, f"a mesh of {replicate} × {self._world.size // replicate}\n{description}")
            self._core = _C.Sharded(self._world, replicate, parts, dict(options))
            self._mark_units(True)
        except BaseException:
            self._release()
            raise
        # A tied parameter goes by its first name.
        self._names = {id(tensor): name for _, _, parameters in parts for name, tensor in reversed(parameters)}
        if options.get("output_dtype") is not None:
            self._output_hook = model.register_forward_hook(_cast_to(options["output_dtype"]))

    def _prepare(
        self, model: torch.nn.Module, units: Iterable[str | int], options: ShardOptions, error: list[str]
    ) -> tuple[list[tuple[str, _C.Unit, Parameters]], str]:
        """The units, the root last, and what has to be the same on every rank. Errors are told to all of them."""
        parts: list[tuple[str, _C.Unit, Parameters]] = []
        if error:
            return parts, ""
        try:
            for name, module, parameters in plan_units(model, units):
                parts.append((name, self._acquire(module), parameters))
            _C.check_shardable(parts, dict(options))
        except _C.UserError as caught:
            error.append(str(caught))
        return parts, _describe(parts, options)

    def _acquire(self, module: torch.nn.Module) -> _C.Unit:
        unit = _units.acquire(module, self)
        self._modules.append((weakref.ref(module), unit))
        return unit

    def _mark_units(self, sharded: bool) -> None:
        for reference, unit in self._modules:
            module = reference()
            unit.needs_hooks = sharded
            unit.reads_no_parameters = sharded and module is not None and is_plain_embedding(module)

    def _release(self) -> None:
        for reference, _ in self._modules:
            module = reference()
            if module is not None:
                _units.release(module, self)
        self._modules.clear()
        if self._output_hook is not None:
            self._output_hook.remove()

    @property
    def units(self) -> list[str]:
        """The names of the units in the order of the model; the root, "", last."""
        return self._core.unit_names()

    @property
    def _holds_full_state(self) -> bool:
        return self._world.rank % (self._world.size // self._replicate) == 0

    def usage(self) -> _C.ShardUsage:
        """What sharding holds on this rank now, in bytes, and what it has done."""
        return self._core.usage()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside of it keeps full gradients; the first one after it reduces what came together."""
        open_ = self._core.no_sync()
        try:
            yield
        finally:
            open_.close()

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """The norm of all gradients of all ranks, each once. Collective."""
        return self._core.grad_norm(norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As torch.nn.utils.clip_grad_norm_() without sharding; returns the norm before. Collective."""
        return self._core.clip_grad_norm(max_norm, norm_type)

    def with_full_parameters(self, body: Callable[[], object], *, write_back: bool = False) -> None:
        """Calls `body` while every parameter is full. Between steps. Collective; holds the whole model.

        Args:
            body: called on every rank.
            write_back: what it writes is kept; every rank writes the same then. Else writing is an error.
        """
        self._core.with_full_parameters(body, write_back)

    def reshard(self) -> None:
        """Lets go of the full parameters that a forward without a backward has left."""
        self._core.reshard()

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """The model's state under the names of `model.state_dict()`. Between steps. Collective unless `sharded`.

        Args:
            sharded: this rank's pieces, as ShardPiece, which lie in the parameters' own memory; of buffers, which are
                not sharded, the tensors. Else whole tensors on the CPU, on rank 0 of each copy of the model, and
                nothing on the other ranks: what torch saves and loads without sharding.
        """
        model = self._living_model()
        if sharded:
            values: dict[str, Any] = {
                name: ShardPiece(tuple(full_size), begin, end, data)
                for name, full_size, begin, end, data in self._core.shards()
            }
        else:
            values = self._core.full_state()
            if not self._holds_full_state:
                return {}
        state = {}
        for key, entry in model.state_dict(keep_vars=True).items():
            name = self._name_of(entry)
            if name is not None:
                state[key] = values[name]
            elif isinstance(entry, torch.Tensor):
                state[key] = entry.detach() if sharded else entry.detach().to("cpu", copy=True)
            else:
                state[key] = entry
        return state

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes over a state, of which each rank keeps its pieces. Between steps. Collective.

        Args:
            state: whole tensors, as `state_dict()` of a model without sharding has them, the same on every rank; or
                sharded state dicts of any number of ranks, that together hold what this rank needs.

        Raises:
            UserError: on every rank, when on one of them a name is missing or unknown, a shape is another, or the
                pieces do not suffice; nothing has changed then.
        """
        error: list[str] = []
        load: Callable[[], None] = lambda: None  # noqa: E731
        try:
            load = self._loading([state] if isinstance(state, Mapping) else list(state))
        except _C.UserError as caught:
            error.append(str(caught))
        agree(self._world, error)
        load()

    def _loading(self, states: list[Mapping[str, Any]]) -> Callable[[], None]:
        """Checks what is to be loaded, and returns what is left to do."""
        entries = self._living_model().state_dict(keep_vars=True)
        _check_names(entries, states)
        pieces, full, buffers, extra = [], {}, [], []
        for state in states:
            for key, value in state.items():
                entry = entries[key]
                name = self._name_of(entry)
                module = self._owner_of_extra_state(key)
                if name is not None and isinstance(value, ShardPiece):
                    _check_plain(key, value.data)
                    pieces.append((name, list(value.full_size), value.begin, value.end, value.data))
                elif name is not None:
                    _check_plain(key, value)
                    full[name] = value
                elif module is not None:
                    extra.append((module, value))
                elif isinstance(entry, torch.Tensor):
                    _check_plain(key, value)
                    _check_buffer(key, entry, value)
                    buffers.append((entry, value))
        if pieces and full:
            raise _C.UserError(
                "[shard] expected whole parameters or pieces of them; found both: "
                f"'{pieces[0][0]}' and '{next(iter(full))}'"
            )
        # Both check everything before they change anything, and neither waits for other ranks.
        if pieces:
            self._core.check_shards(pieces)
        else:
            self._core.check_full_state(full)

        def load() -> None:
            if pieces:
                self._core.load_shards(pieces)
            else:
                self._core.load_full_state(full)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for module, value in extra:
                module.set_extra_state(value)

        return load

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        keep_last: int = 0,
    ) -> None:
        """Writes `step-…/` below `directory`, whole or not at all: docs/checkpoints.md. Between steps. Collective.

        Each rank writes its pieces, and rank 0 the buffers; any number of ranks can load them, in C++ as well.

        Args:
            directory: the same for every rank.
            step: a checkpoint of the same step is replaced.
            optimizer: what it remembers is saved, too; not its options, such as the learning rate.
            keep_last: so many complete checkpoints stay; 0: all.

        Raises:
            UserError: on every rank, when one of them cannot save.
        """
        error: list[str] = []
        entries: list[Entry] = []
        try:
            # Of one rank, as state_dict() has them: where ranks differ, a mixture would fit none of them.
            entries = entries_of(self._core, self._buffers() if self._world.rank == 0 else {})
            if optimizer is not None:
                entries += optimizer_entries(optimizer, entries, self._name_of)
        except _C.UserError as caught:
            error.append(str(caught))
        agree(self._world, error)
        _C.save_checkpoint(self._world, os.fspath(directory), step, keep_last, entries, {"step": str(step)})

    def load_checkpoint(self, path: str | os.PathLike[str], *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Loads what save_checkpoint() or `neap train` has written. Between steps. Collective.

        Args:
            path: a checkpoint, or a directory of them, of which the newest is taken.
            optimizer: what it remembers is loaded, too; its options stay as they are.

        Raises:
            UserError: on every rank, when there is no such checkpoint, or one of another model, or a damaged one.
        """
        error: list[str] = []
        loading: Loading | None = None
        buffers = self._buffers()
        try:
            loading = Loading(os.fspath(path), entries_of(self._core, buffers), buffers)
            if optimizer is not None:
                loading.into(optimizer, self._name_of)
        except _C.UserError as caught:
            error.append(str(caught))
        agree(self._world, error)
        assert loading is not None
        loading.load(self._world)
        for key, value in buffers.items():
            module = self._owner_of_extra_state(key)
            if module is not None:
                module.set_extra_state(value)

    def dissolve(self) -> None:
        """Gives every parameter its whole values back, drops gradients, and ends the sharding. Between steps.

        Collective. The parameters stay the same objects.
        """
        self._core.dissolve()
        self._mark_units(False)
        self._release()
        self._names = {}

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        return self._names.get(id(parameter))

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that are part of the model's state, and extra state that is a tensor."""
        entries = self._living_model().state_dict(keep_vars=True)
        return {k: v for k, v in entries.items() if isinstance(v, torch.Tensor) and self._name_of(v) is None}

    def _owner_of_extra_state(self, key: str) -> torch.nn.Module | None:
        owner, _, last = key.rpartition(".")
        return self._living_model().get_submodule(owner) if last == _EXTRA_STATE_KEY_SUFFIX else None

    def _living_model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise _C.UserError("[shard] expected a model that is still there; found that it is gone; keep it")
        return model

    def __repr__(self) -> str:
        return f"<neaptide.Sharded of {len(self.units)} units, rank {self._world.rank} of {self._world.size}>"


def fully_shard(
    model: torch.nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    units: Iterable[str | int] = (),
    *,
    timeout: float = 300.0,
    **options: Unpack[ShardOptions],
) -> Sharded:
    """Keeps parameters, gradients and optimizer state in pieces over the ranks of torch.distributed.

    Between steps each parameter object is this rank's piece, a one-dimensional and possibly empty range of its
    elements; while its unit runs, the same object is the full parameter. So module and optimizer keep what they have,
    and an optimizer made before or after steps the pieces. Gradients come reduced over all ranks, as pieces.
    Collective: every rank calls it with the same model and options.

    Args:
        model: any module, with the same values on every rank. Its forward runs by calling it.
        mesh: a DeviceMesh of one dimension, or of two over all ranks (copies × pieces), or a process group.
            None: all ranks.
        units: which of its modules are gathered one at a time, named as for `nt.offload()`. Empty: the layers, and
            beside them modules with a matrix of their own alone, such as an embedding and an output head. Parameters of
            no unit are whole from the start of the model's forward to the end of backward.
        timeout: seconds that a rank waits for the others, in every collective. Of the first call for a group.
        options: see ShardOptions.

    Returns:
        A handle with state dicts, clipping, no_sync() and dissolve(). The model keeps it alive.

    Raises:
        UserError: torch.distributed is not initialised; or on every rank, when on one of them an option, an entry of
            `units` or the model will not do, or when they differ. Nothing has changed then.
        Error: a rank did not come in time, or left.
    """
    return Sharded(model, mesh, units, timeout, options)


def _cast_to(dtype: torch.dtype) -> Callable[[torch.nn.Module, Any, Any], Any]:
    def cast(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, outputs)

    return cast


def _describe(parts: Sequence[tuple[str, _C.Unit, Parameters]], options: ShardOptions) -> str:
    """What has to be the same on every rank, line by line."""
    lines = [f"{name}={value!r}" for name, value in sorted(options.items()) if not callable(value)]
    for name, _, parameters in parts:
        lines.append(f"unit '{name}'")
        lines += [
            f"{parameter} {tuple(tensor.shape)} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"
            for parameter, tensor in parameters
        ]
    return "\n".join(lines)


def _check_names(entries: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
    given = {key for state in states for key in state}
    missing = [key for key in entries if key not in given]
    unknown = [key for key in given if key not in entries]
    if missing or unknown:
        raise _C.UserError(
            "[shard] expected the names of the model's state dict; found "
            + "; ".join(
                f"{len(names)} {kind}, such as '{min(names)}'"
                for names, kind in ((missing, "missing"), (unknown, "unknown"))
                if names
            )
        )


def _check_plain(key: str, value: Any) -> None:
    """Before anything changes: others would fail when their values are asked for, and on one rank alone."""
    if not isinstance(value, torch.Tensor) or value.is_meta or is_traceable_wrapper_subclass(value):
        meta = " on meta" if isinstance(value, torch.Tensor) and value.is_meta else ""
        raise _C.UserError(
            f"[shard] expected '{key}' to be a plain tensor with values; found a {type(value).__name__}{meta}; "
            "make a whole tensor of it first (of a DTensor: full_tensor())"
        )


def _check_buffer(key: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != buffer.shape:
        raise _C.UserError(f"[shard] expected '{key}' of shape {tuple(buffer.shape)}; found {tuple(value.shape)}")
