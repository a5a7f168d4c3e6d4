"""Tensors of batches that the workers on the CPU read, in a run with heterogeneous workers.

Note [values of heterogeneous workers]: heterogeneous workers compute the dense part of a job, and read no samples. They
know the shape, dtype and memory order of each tensor of a batch. A job gives them the arguments that the dense part
takes. Operations outside jobs that need no values, such as `shape` and `.to(device)`, work on every worker. Any other
one sends the whole tensor to the heterogeneous workers first, so that its result is the same on all. Every worker must
make it, as with all batches of loaders; see `logical_tensor`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_map_only

from rankless.collectives.point_to_point import start_receive, start_send
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import Replicate
from rankless.user_code import caller_line

SENDS = (
    "sends the whole tensor to the heterogeneous workers, here and wherever else it runs; a job sends only what its "
    "dense part takes"
)


class TensorDescription(msgspec.Struct, frozen=True):
    """What heterogeneous workers know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "TensorDescription":
        """Return the description of a tensor."""
        return TensorDescription(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def make_fake(self) -> Tensor:
        """Return a tensor without memory that operations answer with the right shapes and dtypes."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class ReadTensor:
    """Stands in a batch for a tensor that workers on the CPU have read: its value, or a description on others."""

    def __init__(self, known: Tensor | TensorDescription) -> None:
        self.known = known


def can_be_described(leaf: object) -> bool:
    """Return whether heterogeneous workers get a description of a leaf of a batch, and not its value."""
    return type(leaf) is Tensor and leaf.dim() > 0 and leaf.layout is torch.strided and not leaf.is_quantized


def order_memory_densely(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has no gaps and no repetitions, as workers get it that receive it."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def find_kinds_axis(mesh: Mesh) -> MeshAxis | None:
    """Return the axis of a mesh with heterogeneous workers; None without them."""
    return next((axis for axis in mesh.axes if axis.stage_workers), None)


class ReaderTensor(LogicalTensor):
    """A tensor that workers on the CPU have read. See Note [values of heterogeneous workers].

    It is not divided: its placement is `Replicate`.
    """

    @staticmethod
    def __new__(
        cls: type["ReaderTensor"], known: Tensor, *, mesh: Mesh, monitor: GatherMonitor, has_value: bool
    ) -> "ReaderTensor":
        """Create the wrapper, which has the tensor's shape and strides, and no storage."""
        wrapper: ReaderTensor = Tensor._make_wrapper_subclass(
            cls, known.size(), strides=known.stride(), dtype=known.dtype, device=known.device, requires_grad=False
        )
        return wrapper

    def __init__(self, known: Tensor, *, mesh: Mesh, monitor: GatherMonitor, has_value: bool) -> None:
        Tensor.__init__(self)
        self._known = known.detach()
        self._has_value = has_value
        self._whole: Tensor | None = None
        self._monitor = monitor
        self.placement = Replicate()  # type: ignore[assignment]  # it is whole where it is
        self.mesh = mesh
        self.read_again = None

    @property
    def local(self) -> Tensor:
        """The value, on a worker that has it."""
        assert self._has_value, "only the workers on the CPU have read it"
        return self._known

    @property
    def is_everywhere(self) -> bool:
        """Whether all workers have the value."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """Return the value. The first call sends it to the heterogeneous workers. Collective.

        Raises DataError in the capture of a job, which would have the value as a constant.
        """
        if self._whole is None:
            where = caller_line()
            if get_proxy_mode() is not None or detect_fake_mode() is not None:
                raise DataError(
                    expected="batches of loaders as arguments of a job, because heterogeneous workers do not read them",
                    found="a batch that a job reads from its closure",
                    fix="pass it to the job as an argument",
                    where=where,
                )
            with self._monitor.watch_wait(where), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                found = self._monitor.run_for_all(self._gather, self.mesh)
                self._known, self._has_value, self._whole = found, True, found
        return self._whole

    def _gather(self, mesh: Mesh) -> Tensor:
        """Return the value, which heterogeneous workers get. Collective."""
        mesh.check_sync_point(
            f"an operation on a whole batch of {self.dtype} {list(self.shape)} outside jobs",
            names=lambda: ["batch, and the same part of it,"],
            digests=[self.fingerprint],
        )
        axis = find_kinds_axis(mesh)
        assert axis is not None
        (found,) = share_values([self], [axis.stage_workers[1]], axis)
        assert found is not None
        return found

    def _divide_again(self, mesh: Mesh) -> Tensor:
        """Note the workers that are left. Nothing is divided, and all of those on the CPU have the value."""
        self.mesh = mesh
        return self

    def _apply_func_to_rows(self, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that keeps the position of every value, such as a cast."""
        if self._has_value:
            rest, kwargs = tree_map_only(LogicalTensor, lambda other: other.local, (rest, kwargs))
        else:
            rest, kwargs = tree_map_only(ReaderTensor, lambda other: other._known, (rest, kwargs))
        result = func(self._known, *rest, **kwargs)
        if result is self._known:
            return self
        if not isinstance(result, Tensor):
            return result
        converted = ReaderTensor(result, mesh=self.mesh, monitor=self._monitor, has_value=self._has_value)
        converted.fingerprint = self.fingerprint
        if self.is_everywhere:
            converted._whole = converted._known
        return converted


def share_values(
    tensors: Sequence[ReaderTensor], takers: Sequence[Sequence[int]], axis: MeshAxis
) -> list[Tensor | None]:
    """Send values from the first worker on the CPU to heterogeneous workers. Collective.

    Args:
        tensors: The tensors, the same on all workers.
        takers: For each the workers that need it, by their ranks along the axis.
        axis: The axis of the mesh with heterogeneous workers.

    Returns:
        For each the value; None on a heterogeneous worker that does not need it.
    """
    assert axis.group is not None
    sender = axis.stage_workers[0][0]
    pending, found = [], []
    for tensor, workers in zip(tensors, takers, strict=True):
        value = tensor._known if tensor._has_value else None
        if axis.rank == sender and tensor.numel():
            data = _as_bytes(tensor.local)
            targets = [worker for worker in workers if worker not in axis.stage_workers[0]]
            pending += [(start_send(data, group=axis.group, target=worker), data) for worker in targets]
        elif value is None and axis.rank in workers:
            value = _receive(tensor, sender, axis)
        found.append(value)
    for work, _ in pending:
        work.wait()
    return found


def _as_bytes(value: Tensor) -> Tensor:
    """Return the memory of a tensor on the host. Backends support bytes, but not every dtype."""
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    dense = torch.empty_strided((plain.numel(),), (1,), dtype=plain.dtype, device="cpu")
    dense.as_strided(plain.shape, plain.stride()).copy_(plain)
    return dense.view(torch.uint8)


def _receive(tensor: ReaderTensor, sender: int, axis: MeshAxis) -> Tensor:
    """Return the value of a tensor that another worker sends, in the same order of memory."""
    assert axis.group is not None
    dense = torch.empty((tensor.numel(),), dtype=tensor.dtype, device="cpu")
    if tensor.numel():
        start_receive(dense.view(torch.uint8), group=axis.group, source=sender).wait()
    with torch._C.DisableTorchFunctionSubclass():
        return dense.as_strided(tensor.size(), tensor.stride()).to(tensor.device)
