"""A batch that every rank knows whole and holds in part: what a loader yields on a mesh, and what jobs take.

Note [local is a view of the whole]: once gathered, `local` becomes a view of the whole tensor. So whatever a
script does to the whole in place, also through a view or a NumPy array, is in the rows that a job then takes,
and an operation that would part the two (a transpose in place, new storage) is refused.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from rankless.collectives.tensor_collectives import all_gather
from rankless.context.once import require_not_in_once
from rankless.context.world import World
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.parallel.placement import Shard
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
"""Answered by the wrapper itself, which has the whole's shape, type and device."""

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
"""Done on each rank's rows, and still logical: they change no value's place."""


class GatherMonitor:
    """Tells the user, once, that an operation outside a job made every rank gather a batch.

    With a `world` it also knows when the other ranks will not come, and says for whom this one waits.
    """

    def __init__(self, notify: Callable[[str], None], *, world: World | None = None) -> None:
        self._notify = notify
        self._has_warned = False
        self._world = world

    def warn_once(self, operation: Callable[..., Any]) -> None:
        """Say which operation, and at which line of the script."""
        if self._has_warned:
            return
        self._has_warned = True
        name = resolve_name(operation) or getattr(operation, "__name__", str(operation))
        self._notify(
            f"{caller_line()}: {name} outside a job gathers the whole batch on every rank, here and "
            "wherever else it is done; inside a job nothing is gathered"
        )

    @contextmanager
    def watch_wait(self, where: str) -> Iterator[None]:
        """While a gather for that line lasts: refused where rank 0 is alone; said where the others do not come."""
        if self._world is None:
            yield
            return
        rank, record = self._world.mesh.rank, self._world.send_record
        require_not_in_once(self._world, f"an operation on a whole batch at {where}")

        def complain() -> None:
            text = (
                f"rank {rank} has waited {WAIT_SECONDS:.0f} s at {where} for the other ranks to come to the same "
                "operation on a whole batch: do it on every rank, and print its result on one"
            )
            record(Notice(rank=rank, time_ns=time.monotonic_ns(), text=text))

        timer = threading.Timer(WAIT_SECONDS, complain)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class LogicalTensor(Tensor):
    """A whole tensor of which this rank holds some rows.

    A loader yields it on several ranks. `.shape`, `.dtype` and `.device` are those of the whole tensor. Casts and
    `.to(device)` keep it logical. Any other operation outside a job works on the whole tensor, which is gathered once
    and kept; every rank must call it. Pickling and copying give the whole as a plain tensor.

    Attributes:
        placement (Shard): The dim that is split, and the number of rows of each rank.
        mesh (Mesh): The ranks that hold the rows.
    """

    placement: Shard
    mesh: Mesh
    fingerprint: int = 0
    """64 bits that are equal on all ranks that hold rows of the same batch; 0 if unknown."""

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
        """The wrapper, with the whole's shape and no storage."""
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
        self._monitor = monitor
        self.placement = placement
        self.mesh = mesh

    @property
    def local(self) -> Tensor:
        """This rank's rows, as a plain tensor of shape (rows, ...)."""
        return self._local

    def whole(self) -> Tensor:
        """Return the whole as a plain tensor. The first call gathers it from all ranks, so every rank must call it.

        Raises:
            RanksDiverged: Another rank makes another call, or holds rows of another batch.
            RanklessError: The call is inside `rankless.once`.
        """
        if self._whole is None:
            where = caller_line()
            with self._monitor.watch_wait(where), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.mesh.check_sync_point(
                    f"an operation on a whole batch of {self.dtype} {list(self.shape)} outside jobs",
                    names=lambda: ["batch, and the same part of it,"],
                    digests=[self.fingerprint],
                )
                self._whole = _gather(self._local, placement=self.placement, mesh=self.mesh)
                dim, rank = self.placement.dim, self.mesh.rank
                length = self.placement.lengths[rank]
                self._local = self._whole.narrow(dim, self.placement.start(rank), length)
        return self._whole

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """PyTorch's hook for every operation called from Python."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            if func in _HASHING:
                return func(*args, **kwargs)
            if isinstance(first, LogicalTensor):
                if func in _METADATA and first._whole is None:
                    return func(*args, **kwargs)
                if func in _ROWWISE and not (first._whole is not None and first._whole.requires_grad):
                    return _apply_to_rows(func, first, args[1:], kwargs)
        return _apply_to_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """PyTorch's hook for operations that C++ calls: the net below `__torch_function__`."""
        return _apply_to_whole(func, args, kwargs or {})


def _apply_to_rows(
    func: Callable[..., Any], tensor: LogicalTensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    rest, kwargs = tree_map_only(LogicalTensor, lambda other: other.local, (rest, kwargs))
    result = func(tensor.local, *rest, **kwargs)
    if result is tensor.local:
        return tensor
    if not isinstance(result, Tensor):
        return result
    kept = LogicalTensor(result, placement=tensor.placement, mesh=tensor.mesh, monitor=tensor._monitor)
    kept.fingerprint = tensor.fingerprint
    return kept


def _apply_to_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logical = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LogicalTensor)]
    for tensor in logical:
        if tensor._whole is None:
            tensor._monitor.warn_once(func)
            tensor.whole()
    before = [_layout(tensor.whole()) for tensor in logical]
    plain_args, plain_kwargs = tree_map_only(LogicalTensor, lambda tensor: tensor.whole(), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for tensor, layout in zip(logical, before, strict=True):
        if _layout(tensor.whole()) != layout:
            raise DataError(
                expected="operations that leave a batch's shape and storage as they are",
                found=f"{resolve_name(func) or func}, which changed them in place",
                fix="use the operation that gives a new tensor (without the underscore at its end)",
                where=caller_line(),
            )
        if result is tensor.whole():
            result = tensor
    return result


def _layout(whole: Tensor) -> tuple[object, ...]:
    return whole.shape, whole.stride(), whole.dtype, whole.data_ptr()


def _gather(local: Tensor, *, placement: Shard, mesh: Mesh) -> Tensor:
    """The whole tensor, gathered as bytes: Gloo and NCCL each lack some types, and both know bytes."""
    leading = local.to(mesh.device).movedim(placement.dim, 0).contiguous()
    row_shape = leading.shape[1:]
    if row_shape.numel() == 0:
        whole = leading.new_empty((sum(placement.lengths), *row_shape))
    else:
        rows = leading.reshape(leading.shape[0], row_shape.numel()).view(torch.uint8)
        gathered = all_gather(rows, mesh=mesh, dim=0, lengths=placement.lengths)
        whole = gathered.view(local.dtype).reshape(-1, *row_shape)
    return whole.movedim(0, placement.dim).to(local.device)
