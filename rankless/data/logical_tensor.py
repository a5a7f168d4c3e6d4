"""The logical tensor: a batch whose rows are split over the ranks, and that behaves like the whole tensor.

The loader yields logical tensors on a mesh, and jobs take their local rows without communication.

Note [local is a view of the whole]: the first gather replaces `local` by a view of the whole tensor. An in-place change
of the whole, also through a view or a NumPy array, is then visible in the rows that a job takes. An operation that
would separate the two, such as an in-place transpose or new storage, raises `DataError`.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from rankless.collectives.mesh_collectives import all_gather
from rankless.context.world import World
from rankless.errors import DataError, LostWorkerError
from rankless.parallel.batch_division import BatchDivision, list_batch_axes
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard
from rankless.records.events import Notice
from rankless.user_code import caller_line

WAIT_SECONDS = 5.0

_HASHING = frozenset({Tensor.__hash__})

_METADATA: frozenset[Any] = frozenset(
    {
        Tensor.__len__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_signed,
        Tensor.ndimension,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
        Tensor.stride,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
        *(
            vars(torch._C.TensorBase)[name].__get__
            for name in ("device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta")
        ),
        *(
            vars(torch._C.TensorBase)[name].__get__
            for name in ("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape")
        ),
    }
)
"""Operations that need only the shape, dtype and device, which the wrapper knows."""

_ROWWISE: frozenset[Any] = frozenset(
    {
        Tensor.bfloat16,
        Tensor.bool,
        Tensor.byte,
        Tensor.clone,
        Tensor.contiguous,
        Tensor.cpu,
        Tensor.cuda,
        Tensor.double,
        Tensor.float,
        Tensor.half,
        Tensor.int,
        Tensor.long,
        Tensor.pin_memory,
        Tensor.short,
        Tensor.to,
        Tensor.type,
        torch.clone,
    }
)
"""Operations that keep the position of every value. They run on the local rows, and the result stays logical."""


GATHERS = "gathers the whole batch on every rank, here and wherever else it runs; inside a job nothing is gathered"


class GatherMonitor:
    """Warns once that an operation outside a job gathers batches, and watches each gather.

    With a `world` it refuses a gather inside `rankless.once`, and warns if the other ranks do not join it. `effect`
    says what the operation does.
    """

    def __init__(self, notify: Callable[[str], None], *, world: World | None = None, effect: str = GATHERS) -> None:
        self._notify = notify
        self._effect = effect
        self._has_warned = False
        self._world = world

    def warn_once(self, operation: Callable[..., Any]) -> None:
        """Warn of the operation and of the script's line, the first time."""
        if self._has_warned:
            return
        self._has_warned = True
        name = resolve_name(operation) or getattr(operation, "__name__", str(operation))
        self._notify(f"{caller_line()}: {name} outside a job {self._effect}")

    def run_for_all(self, gather: Callable[[Mesh], Tensor], mesh: Mesh) -> Tensor:
        """Return what a gather returns, as an operation of all workers."""
        if self._world is None:
            return gather(mesh)
        return self._world.run_for_all(lambda world: gather(world.mesh))

    @contextmanager
    def watch_wait(self, where: str) -> Iterator[None]:
        """Watch a gather that the script's line `where` caused.

        Raises `RanklessError` inside `rankless.once`. Warns after `WAIT_SECONDS` that this rank waits for the
        others.
        """
        if self._world is None:
            yield
            return
        rank, record = self._world.mesh.rank, self._world.send_record
        self._world.require_not_in_once(
            f"an operation on a whole batch at {where}",
            fix="before, outside of once, take the whole of it, as batch[:], and pass that: casts, .to(), .cpu(), "
            ".clone() and .contiguous() keep a batch divided",
        )

        def warn() -> None:
            text = (
                f"rank {rank} has waited {WAIT_SECONDS:.0f} s at {where} for the other ranks to run the same "
                "operation on a whole batch: run it on every rank, and print its result on one"
            )
            record(Notice(rank=rank, time_ns=time.monotonic_ns(), text=text))

        timer = threading.Timer(WAIT_SECONDS, warn)
        timer.daemon, timer.name = True, "rankless wait"
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class LogicalTensor(Tensor):
    """A whole tensor of which this rank holds some rows.

    `shape`, `dtype` and `device` describe the whole tensor. `local` holds this rank's rows, split over `mesh` as
    `placement` says. Casts and `.to(device)` stay logical. Every other operation runs on the whole tensor, which
    the first such operation gathers. Gathering is collective, so every rank must run that operation. Pickling and
    copying give a plain tensor.

    Attributes:
        placement (Shard): The dim that is split, and the number of rows of each rank.
        mesh (Mesh): The ranks that hold the rows.

    Example:
        >>> def shapes(rank):
        ...     (batch,) = rankless.loader(range(6), batch_size=6)
        ...     return batch.shape, batch.local.shape, batch.whole().shape
        >>> rankless.spawn(shapes, nprocs=2)[1]
        (torch.Size([6]), torch.Size([3]), torch.Size([6]))
    """

    placement: Shard
    mesh: Mesh
    fingerprint: int = 0
    """64 bits that identify the batch and the tensor's path in it: equal on all ranks, or 0 if unknown."""

    @staticmethod
    def __new__(
        cls: type["LogicalTensor"],
        local: Tensor,
        *,
        placement: Shard,
        mesh: Mesh,
        monitor: GatherMonitor,
        whole: Tensor | None = None,
    ) -> "LogicalTensor":
        """Create the wrapper, which has the whole tensor's shape and no storage."""
        shape = list(local.shape)
        shape[placement.dim] = sum(placement.lengths)
        return Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device, requires_grad=False
        )

    def __init__(
        self,
        local: Tensor,
        *,
        placement: Shard,
        mesh: Mesh,
        monitor: GatherMonitor,
        whole: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._local = local.detach()
        self._whole = whole
        self._find_whole: Callable[[], Tensor] | None = None
        """Computes the whole tensor from that of another one, which every rank has."""
        self._monitor = monitor
        self.placement = placement
        self.mesh = mesh
        self.read_again: Callable[[], Tensor] | None = None
        """Reads the whole tensor again, where workers go on without one that was lost with its rows."""

    @property
    def local(self) -> Tensor:
        """This rank's rows as a plain tensor."""
        return self._local

    def whole(self) -> Tensor:
        """Return the whole tensor as a plain tensor. The first call gathers it from all ranks. Collective."""
        if self._whole is None and self._find_whole is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._whole, self._find_whole = self._find_whole(), None
        if self._whole is None:
            where = caller_line()
            with self._monitor.watch_wait(where), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._whole = self._monitor.run_for_all(self._gather, self.mesh)
                dim, rank = self.placement.dim, BatchDivision.of(self.mesh).own_part
                length = self.placement.lengths[rank]
                self._local = self._whole.narrow(dim, self.placement.start(rank), length)
        return self._whole

    def _gather(self, mesh: Mesh) -> Tensor:
        """Return the whole tensor. If `mesh` is not the tensor's, a worker was lost with its rows: read them again."""
        if mesh is not self.mesh:
            return self._read_whole()
        mesh.check_sync_point(
            f"an operation on a whole batch of {self.dtype} {list(self.shape)} outside jobs",
            names=lambda: ["batch, and the same part of it,"],
            digests=[self.fingerprint],
        )
        return _gather(self._local, placement=self.placement, mesh=mesh)

    def _read_whole(self) -> Tensor:
        if self.read_again is None:
            raise LostWorkerError(
                expected="a batch that can be read again, because a worker was lost with its rows",
                found='one of a loader with reading="first"',
                fix="read with another reading=, or start the run again from a checkpoint",
            )
        return self.read_again()

    def _divide_again(self, mesh: Mesh) -> Tensor:
        """Return the tensor divided over another mesh; see `divide_again`."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            whole = self._whole = get_whole_again(self)
            division, dim = BatchDivision.of(mesh), self.placement.dim
            self.placement = Shard(dim, division.split(whole.shape[dim]))
            self.mesh = mesh
            rank = division.own_part
            self._local = whole.narrow(dim, self.placement.start(rank), self.placement.lengths[rank])
        return whole if mesh.size == 1 else self

    def _apply_func_to_rows(self, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that keeps the position of every value, such as a cast."""
        return _apply_to_rows(func, self, rest, kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle an operation called from Python."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            if func in _HASHING:
                return func(*args, **kwargs)
            if isinstance(first, LogicalTensor):
                if func in _METADATA and first._whole is None:
                    return func(*args, **kwargs)
                if func in _ROWWISE and not (first._whole is not None and first._whole.requires_grad):
                    return first._apply_func_to_rows(func, args[1:], kwargs)
        return _apply_to_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle an operation called from C++, which bypasses `__torch_function__`."""
        return _apply_to_whole(func, args, kwargs or {})


def divide_again(tensor: LogicalTensor, mesh: Mesh) -> Tensor:
    """Divide a tensor over another mesh, without a worker that was lost.

    Args:
        tensor: The tensor.
        mesh: The workers that are left.

    Returns:
        The tensor itself, or the whole one as a plain tensor for a mesh of one worker.

    Raises:
        LostWorkerError: The lost worker's rows cannot be read again.
    """
    return tensor if mesh is tensor.mesh else tensor._divide_again(mesh)


def get_whole_again(tensor: LogicalTensor) -> Tensor:
    """Return a whole tensor, without the other ranks. Raises LostWorkerError if it cannot be read again."""
    return tensor._read_whole() if tensor._whole is None else tensor._whole


def _apply_to_rows(
    func: Callable[..., Any], tensor: LogicalTensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = rest, kwargs
    rest, kwargs = tree_map_only(LogicalTensor, lambda other: other.local, given)
    result = func(tensor.local, *rest, **kwargs)
    if result is tensor.local:
        return tensor
    if not isinstance(result, Tensor):
        return result
    converted = LogicalTensor(result, placement=tensor.placement, mesh=tensor.mesh, monitor=tensor._monitor)
    converted.fingerprint = tensor.fingerprint
    is_known = tensor._whole is not None or tensor._find_whole is not None
    if is_known and not any(isinstance(item, LogicalTensor) for item in tree_leaves(given)):
        converted._find_whole = lambda: func(tensor.whole(), *given[0], **given[1])
    if tensor.read_again is not None:
        converted.read_again = functools.partial(_apply_to_read, func, tensor, given)
    return converted


def _apply_to_read(
    func: Callable[..., Any], tensor: LogicalTensor, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> Tensor:
    """Return what an operation on rows gives for the whole tensor, read again."""
    rest, kwargs = tree_map_only(LogicalTensor, get_whole_again, given)
    result: Tensor = func(get_whole_again(tensor), *rest, **kwargs)
    return result


def _apply_to_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logical = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LogicalTensor)]
    for tensor in logical:
        if tensor._whole is None:
            tensor._monitor.warn_once(func)
            tensor.whole()
    before = [_get_layout(tensor.whole()) for tensor in logical]
    plain_args, plain_kwargs = tree_map_only(LogicalTensor, lambda tensor: tensor.whole(), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for tensor, layout in zip(logical, before, strict=True):
        if _get_layout(tensor.whole()) != layout:
            raise DataError(
                expected="operations that keep a batch's shape and storage",
                found=f"{resolve_name(func) or func}, which changed them in place",
                fix="use the operation that returns a new tensor (without the trailing underscore)",
                where=caller_line(),
            )
        if result is tensor.whole():
            result = tensor
    return result


def _get_layout(whole: Tensor) -> tuple[object, ...]:
    return whole.shape, whole.stride(), whole.dtype, whole.data_ptr()


def _gather(local: Tensor, *, placement: Shard, mesh: Mesh) -> Tensor:
    """Return the whole tensor. It travels as bytes, because Gloo and NCCL each lack some dtypes."""
    leading = local.to(mesh.device).movedim(placement.dim, 0).contiguous()
    row_shape = leading.shape[1:]
    if row_shape.numel() == 0:
        whole = leading.new_empty((sum(placement.lengths), *row_shape))
    else:
        rows = leading.reshape(leading.shape[0], row_shape.numel()).view(torch.uint8)
        along_axes = BatchDivision.of(mesh).find_lengths_along_axes(placement.lengths)
        for axis, lengths in reversed(list(zip(list_batch_axes(mesh), along_axes, strict=True))):
            rows = all_gather(rows, among=axis, dim=0, lengths=lengths)
        whole = rows.view(local.dtype).reshape(-1, *row_shape)
    return whole.movedim(0, placement.dim).to(local.device)
