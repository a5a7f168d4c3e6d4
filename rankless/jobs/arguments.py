"""Flatten a job's arguments into tensors, which are inputs of its program, and plain values, which are part of it."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.compiler.capture.capture import ArgumentShape
from rankless.compiler.capture.trace_errors import WHOLE_BATCH
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.data.logical_tensor import LogicalTensor
from rankless.data.tensors_on_cpu_ranks import ReaderTensor
from rankless.errors import CaptureError, ConfigError, DataError
from rankless.jobs.job_definition import JobDefinition
from rankless.parallel.batch_division import BatchDivision, divides_batches
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Replicate, Shard, Sharding, split_lengths

TENSOR = "tensor"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class FlattenedArguments:
    """The tensors of a call in order, and what `unflatten` needs to rebuild the call from other tensors."""

    tensors: tuple[Tensor, ...]
    spec: pytree.TreeSpec
    plain: tuple[Any, ...]
    """One entry per leaf: `TENSOR` for a tensor, else the leaf itself."""
    batch_dims: tuple[int | None, ...] = ()
    """The batch dim of each tensor; None for a tensor without one."""
    position_dims: tuple[int | None, ...] | None = None
    """The dim of positions of each tensor, for the axis `sequence`. None: the first dim besides that of the batch."""

    def unflatten(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with the given tensors in place."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is TENSOR else leaf for leaf in self.plain]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def cache_key(self, job: str) -> Hashable:
        """Return the part of the program cache's key that depends on the arguments."""
        try:
            hash(self.plain)
        except TypeError as error:
            kinds = {type(leaf).__name__ for leaf in self.plain if not isinstance(leaf, Hashable)}
            raise CaptureError(
                expected=f"tensors, numbers, text or None as arguments of job {job!r}, in any nesting",
                found=f"arguments of type {', '.join(sorted(kinds)) or 'unhashable'}",
                fix="pass tensors and plain values, or let the job read the object from its closure",
            ) from error
        return self.spec, self.plain, tuple([(tensor.dtype, get_memory_order(tensor)) for tensor in self.tensors])


def find_leaf_names(function: Callable[..., Any], arguments: FlattenedArguments) -> list[str]:
    """Return the name of the function's argument that holds each leaf of a call."""
    return [name for name, _ in find_leaf_paths(function, arguments)]


def find_leaf_paths(function: Callable[..., Any], arguments: FlattenedArguments) -> list[tuple[str, str]]:
    """Return for each leaf of a call the function's argument and the path in it, as "['ids'][0]"."""
    parameters = inspect.signature(function).parameters
    positional = [name for name, item in parameters.items() if item.kind in POSITIONAL]
    variadic = [name for name, item in parameters.items() if item.kind is inspect.Parameter.VAR_POSITIONAL]
    tree = pytree.tree_unflatten(list(arguments.plain), arguments.spec)
    found = []
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        rest = pytree.keystr(path[2:])
        # Positional arguments form a tuple, keyword arguments a dict.
        match path[1]:
            case pytree.SequenceKey(index) if index < len(positional):
                found.append((positional[index], rest))
            case pytree.SequenceKey(index):
                found.append((variadic[0], f"[{index - len(positional)}]{rest}"))
            case pytree.MappingKey(name):
                found.append((name, rest))
    return found


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> FlattenedArguments:
    """Flatten a call's arguments. NumPy arrays become tensors, and tensors move to the model's device."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for leaf in leaves:
        value = torch.from_numpy(leaf) if isinstance(leaf, numpy.ndarray) else leaf
        if isinstance(value, Tensor):
            tensors.append(value if value.device == device else value.to(device))
            plain.append(TENSOR)
        else:
            plain.append(value)
    return FlattenedArguments(tuple(tensors), spec, tuple(plain), (0,) * len(tensors))


def find_refused_argument(
    function: Callable[..., Any], arguments: FlattenedArguments, *, trains: bool
) -> CaptureError | None:
    """Return the error for the first tensor that no program can have as an argument; None if there is none.

    A sparse tensor has no shards. A gradient would flow out of a job that trains, and be lost.
    """
    for position, tensor in enumerate(arguments.tensors):
        if tensor.layout != torch.strided:
            return CaptureError(
                expected="dense tensors as arguments of a job, which are split between ranks",
                found=f"argument {name_argument(function, arguments, position)} is sparse",
                fix=f"let the job read it from its closure, or register it as a buffer of the model; {WHOLE_BATCH}",
            )
        if trains and tensor.requires_grad:
            return CaptureError(
                expected="arguments of a train job that require no gradient: it computes gradients of its models only",
                found=f"argument {name_argument(function, arguments, position)} requires a gradient, "
                "which would be lost",
                fix="compute it inside the job and pass the module that does with model=, or pass its detach()",
            )
    return None


def name_argument(function: Callable[..., Any], arguments: FlattenedArguments, position: int) -> str:
    """Return the name of a tensor argument: "images", "batch['ids']"."""
    leaves = [place for place, leaf in enumerate(arguments.plain) if leaf is TENSOR]
    name, path = find_leaf_paths(function, arguments)[leaves[position]]
    return name + path


def get_shapes(arguments: FlattenedArguments) -> list[ArgumentShape]:
    """Return the logical shapes of the tensors."""
    return [
        ArgumentShape(shape=tuple(item.shape), dtype=item.dtype, order=get_memory_order(item))
        for item in arguments.tensors
    ]


def get_memory_order(argument: Tensor) -> tuple[int, ...] | None:
    """Return the order of an argument's dims in memory, or None for contiguous memory."""
    known = argument
    if isinstance(argument, LogicalTensor) and not isinstance(argument, ReaderTensor):
        known = argument.local
    return find_memory_order(known.shape, known.stride())


def find_batch_dim(arguments: FlattenedArguments, position: int) -> int | None:
    """Return the dim along which a tensor argument can be divided; None if it has none."""
    tensor, dim = arguments.tensors[position], arguments.batch_dims[position]
    if isinstance(tensor, LogicalTensor) and isinstance(tensor.placement, Shard):
        return tensor.placement.dim
    return None if dim is None or tensor.dim() <= dim else dim


def get_shardings(arguments: FlattenedArguments, mesh: Mesh) -> tuple[Sharding, ...]:
    """Return the shardings of the tensors of a call.

    The axes with the roles `data` and `expert` divide the batch, those with the role `sequence` positions.
    """
    pairs = zip(arguments.tensors, arguments.batch_dims, strict=True)
    found = [get_sharding(tensor, dim, mesh) for tensor, dim in pairs]
    if any(axis.role == "sequence" for axis in mesh.axes):
        found = [
            divide_positions(tensor, sharding, find_position_dim(arguments, place), mesh)
            for place, (tensor, sharding) in enumerate(zip(arguments.tensors, found, strict=True))
        ]
    return tuple(found)


def find_position_dim(arguments: FlattenedArguments, position: int) -> int | None:
    """Return the dim of a tensor argument that the axis `sequence` divides; None if it has none."""
    batch_dim = find_batch_dim(arguments, position)
    given = arguments.position_dims
    dim = (1 if batch_dim in (0, None) else 0) if given is None else given[position]
    return None if dim is None or dim == batch_dim or dim >= arguments.tensors[position].dim() else dim


def divide_positions(argument: Tensor, sharding: Sharding, dim: int | None, mesh: Mesh) -> Sharding:
    """Return the sharding of an argument with a dim divided along the axes with the role `sequence`."""
    if dim is None:
        return sharding
    rows = argument.shape[dim]
    return tuple(
        [
            Shard(dim, split_lengths(rows, axis.size)) if axis.role == "sequence" and rows >= axis.size else placement
            for axis, placement in zip(mesh.axes, sharding, strict=True)
        ]
    )


def get_sharding(argument: Tensor, batch_dim: int | None, mesh: Mesh) -> Sharding:
    """Return the sharding of an argument.

    A loader's batch is divided already. Another tensor is divided on its batch dim; see Note [batch division].
    """
    division = BatchDivision.of(mesh)
    if isinstance(argument, LogicalTensor) and isinstance(argument.placement, Shard):
        dim, parts = argument.placement.dim, argument.placement.lengths
    elif batch_dim is None or argument.dim() <= batch_dim or not division.divides(argument.shape[batch_dim]):
        return (Replicate(),) * len(mesh.axes)
    else:
        dim, parts = batch_dim, division.split(argument.shape[batch_dim])
    lengths = iter(division.find_lengths_along_axes(parts))
    return tuple([Shard(dim, next(lengths)) if divides_batches(axis) else Replicate() for axis in mesh.axes])


def get_local_shard(argument: Tensor, sharding: Sharding, mesh: Mesh) -> Tensor:
    """Return this rank's shard of an argument."""
    is_divided = isinstance(argument, LogicalTensor)
    if isinstance(argument, LogicalTensor):
        argument = argument.local
    for axis, placement in zip(mesh.axes, sharding, strict=True):
        if isinstance(placement, Shard) and not (is_divided and divides_batches(axis)):
            argument = argument.narrow(placement.dim, placement.start(axis.rank), placement.lengths[axis.rank])
    return argument


class PositionDims:
    """The dims of positions of one job's arguments, which the axis `sequence` divides.

    They are those of a plan, those that the script names, or found ones. They decide how a tensor is split, and so the
    speed of a call. They do not change its result.

    Args:
        job: The job.
        planned: The dims in the plan of the run, by argument; None if it has no plan.
    """

    def __init__(self, job: JobDefinition, planned: Mapping[str, int | None] | None) -> None:
        self._job = job
        self._planned = planned
        self._known: dict[Hashable, tuple[int | None, ...]] = {}

    def apply(self, arguments: FlattenedArguments) -> FlattenedArguments:
        """Return a call with the dim of positions of every tensor. Raises `ConfigError` for a name of no argument."""
        key = arguments.spec, arguments.plain, tuple([tensor.dim() for tensor in arguments.tensors])
        if key not in self._known:
            self._known[key] = self._find(arguments)
        return replace(arguments, position_dims=self._known[key])

    def _find(self, arguments: FlattenedArguments) -> tuple[int | None, ...]:
        function, count = self._job.function, len(arguments.tensors)
        if self._planned is not None:
            names = [name_argument(function, arguments, place) for place in range(count)]
            return tuple(self._planned.get(name) for name in names)
        found = [find_position_dim(arguments, place) for place in range(count)]
        marks = "auto" if self._job.plan is None else self._job.plan.sequence
        if marks == "auto":
            return tuple(found)
        leaves = zip(find_leaf_names(function, arguments), arguments.plain, strict=True)
        owners = [name for name, leaf in leaves if leaf is TENSOR]
        for name, dim in marks.items():
            sizes = [tensor.dim() for owner, tensor in zip(owners, arguments.tensors, strict=True) if owner == name]
            if not sizes or (dim is not None and max(sizes) <= dim):
                raise ConfigError(
                    expected=f"in sequence= tensor arguments of job {self._job.name!r}, with dims that they have: "
                    f"{', '.join(dict.fromkeys(owners)) or 'none'}",
                    found=f"{name!r}: {dim!r}" + (f" for {sizes[0]} dims" if sizes else ""),
                    fix="use the name of an argument, and a dim counted from 0, or None",
                    where=self._job.line,
                )
        return tuple(marks.get(owner, dim) for owner, dim in zip(owners, found, strict=True))


class BatchDims:
    """The `batch_dims=` of one job: argument name to dim, None for no batch. All others have the batch in dim 0."""

    def __init__(self, function: Callable[..., Any], marks: Mapping[str, int | None]) -> None:
        self._parameters = dict(inspect.signature(function).parameters)
        self._function = function
        self._name = getattr(function, "__name__", "job")
        self._marks = dict(marks)
        self._leaves: dict[tuple[pytree.TreeSpec, tuple[bool, ...]], tuple[int | None, ...]] = {}
        for name, dim in self._marks.items():
            self._require_known(name)
            if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
                raise ConfigError(
                    expected=f"batch_dims= of job {self._name!r} with dims counted from 0, or None for no batch",
                    found=f"{name!r}: {dim!r}",
                    fix="pass the number of the dim that holds the samples",
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the job has: the marks, without what the calls of this process have found."""
        return {**self.__dict__, "_leaves": {}}

    def apply(self, arguments: FlattenedArguments) -> FlattenedArguments:
        """Return the call with the batch dim of every tensor.

        Raises `DataError` if a loader split the batch on another dim.
        """
        is_tensor = tuple([leaf is TENSOR for leaf in arguments.plain])
        key = arguments.spec, is_tensor
        if key not in self._leaves:
            names = find_leaf_names(self._function, arguments)
            self._leaves[key] = tuple(
                self._marks.get(name, 0) for name, there in zip(names, is_tensor, strict=True) if there
            )
        dims = self._leaves[key]
        for tensor, dim in zip(arguments.tensors, dims, strict=True):
            if (
                isinstance(tensor, LogicalTensor)
                and isinstance(tensor.placement, Shard)
                and tensor.placement.dim != dim
            ):
                raise DataError(
                    expected=f"batches of a loader in job {self._name!r} in dim {tensor.placement.dim}, where it "
                    "collates the samples",
                    found=f"batch_dims= with {dim} for a tensor of shape {list(tensor.shape)}",
                    fix="omit the argument from batch_dims, or collate samples in dim 0 and transpose in the job",
                )
        return replace(arguments, batch_dims=dims)

    def _require_known(self, name: str) -> None:
        open_ended = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in self._parameters.values())
        if name in self._parameters or open_ended:
            return
        known = ", ".join(self._parameters) or "none"
        raise ConfigError(
            expected=f"batch_dims= to name arguments of job {self._name!r}: {known}",
            found=repr(name),
            fix="use a name of the function's signature",
        )
