"""Checks of a collective's arguments, made before anything is sent. All of them raise `ConfigError`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from rankless.collectives.call_signature import Shape
from rankless.collectives.checked_process_group import CheckedGroup
from rankless.errors import ConfigError

GLOO_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
BITWISE = frozenset({"band", "bor", "bxor"})


def require_usable(checked: CheckedGroup, *tensors: Tensor) -> None:
    """Raise `ConfigError` for tensors that the group's backend cannot take."""
    backend = dist.get_backend(checked.torch)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                expected="a tensor",
                found=f"{type(tensor).__name__}",
                fix="pass torch.tensor(…), or use the collectives of objects, such as all_gather_object",
            )
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            kind = "strides of a view" if tensor.layout == torch.strided else str(tensor.layout)
            raise ConfigError(
                expected="a dense, contiguous tensor",
                found=f"{describe_tensor(tensor)} with {kind}",
                fix="pass tensor.contiguous(), and copy the result back if the collective writes to it",
            )
        if backend == "nccl" and tensor.device.type != "cuda":
            raise ConfigError(
                expected="tensors on a GPU, because the group's backend is NCCL",
                found=f"{describe_tensor(tensor)} on {tensor.device}",
                fix="move it there first, or make a Gloo group: torch.distributed.new_group(backend='gloo')",
            )
        if backend == "gloo" and tensor.dtype not in GLOO_DTYPES:
            raise ConfigError(
                expected="a dtype that Gloo can send: floats, complex, int8, uint8, int32, int64 or bool",
                found=describe_tensor(tensor),
                fix="convert it to int32 or int64, or send tensor.view(torch.uint8)",
            )


def reduction_name(op: ReduceOp.RedOpType, tensor: Tensor) -> str:
    """Return the reduction's name, as "sum". Raises `ConfigError` for a reduction that the dtype does not have."""
    name = str(op).rpartition(".")[2].lower()
    floats = tensor.is_floating_point() or tensor.is_complex()
    wrong = (
        (name in BITWISE and floats)
        or (name == "avg" and not floats)
        or (tensor.is_complex() and name not in ("sum", "avg"))
    )
    if wrong:
        raise ConfigError(
            expected=f"a dtype that has the reduction {name}",
            found=dtype_name(tensor),
            fix="convert the tensor: bitwise reductions take integers, averages take floats, complex numbers only sums",
        )
    return name


def require_any(tensors: Sequence[Tensor]) -> None:
    """Raise `ConfigError` for an empty list."""
    if not tensors:
        raise ConfigError(expected="at least one tensor", found="an empty list", fix="leave the call out")


def require_one_each(tensors: Sequence[object], checked: CheckedGroup, name: str) -> None:
    """Raise `ConfigError` unless a list has one element for each rank of the group."""
    if len(tensors) != checked.size:
        raise ConfigError(
            expected=f"{name} with one element for each of {checked.size} ranks",
            found=f"{len(tensors)}",
            fix="pass as many as the group has ranks: torch.distributed.get_world_size(group)",
        )


def require_shape(tensor: Tensor, shape: Shape, expected: str) -> None:
    """Raise `ConfigError` unless a tensor has a shape."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            expected=f"{expected}, of shape {list(shape)}",
            found=f"{list(tensor.shape)}",
            fix="give both the shape that this rank sends or receives",
        )


def require_one_dtype(tensor: Tensor, others: Sequence[Tensor]) -> None:
    """Raise `ConfigError` unless all tensors have one dtype."""
    for other in others:
        if other.dtype != tensor.dtype:
            raise ConfigError(
                expected=f"tensors of one dtype, here {dtype_name(tensor)}",
                found=dtype_name(other),
                fix="convert one of them before the call",
            )


def require_list_on_root(
    tensors: Sequence[Tensor] | None, root: int, checked: CheckedGroup, name: str, role: str
) -> None:
    """Raise `ConfigError` unless the list is passed on the root, and only there."""
    is_root = checked.rank == root
    if is_root != (tensors is not None):
        raise ConfigError(
            expected=f"{name}= on rank {root} of the group, its {role}, and on no other",
            found=f"{'none' if is_root else 'one'} on rank {checked.rank}",
            fix=f"pass {name}= on rank {root}, and None on the others",
        )


def require_multiple(whole: Tensor, part: Tensor, checked: CheckedGroup, name: str) -> None:
    """Raise `ConfigError` unless `whole` has as many elements as one `part` for each rank."""
    require_one_dtype(whole, [part])
    if whole.numel() != part.numel() * checked.size:
        raise ConfigError(
            expected=f"{name} with {checked.size} times as many elements as each part's {part.numel()}",
            found=f"{whole.numel()} elements, shape {list(whole.shape)}",
            fix=f"make it {[checked.size * part.shape[0], *part.shape[1:]] if part.dim() else [checked.size]}",
        )


def split_shapes(tensor: Tensor, sizes: Sequence[int] | None, checked: CheckedGroup, name: str) -> tuple[Shape, ...]:
    """Return the shapes of a tensor's parts. Raises `ConfigError` for sizes that do not add up to its rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if sizes is None:
        if rows % checked.size or not tensor.dim():
            raise ConfigError(
                expected=f"{name} whose {rows} rows can be split into {checked.size} equal parts",
                found=f"shape {list(tensor.shape)}",
                fix=f"pass {name}_split_sizes=",
            )
        sizes = [rows // checked.size] * checked.size
    if len(sizes) != checked.size or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigError(
            expected=f"{name}_split_sizes= of {checked.size} numbers that add up to the {rows} rows of {name}",
            found=f"{list(sizes)}",
            fix="pass the number of rows that each rank receives, or sends",
        )
    return tuple((size, *tensor.shape[1:]) for size in sizes)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """Return the shapes of a list of tensors."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def dtype_name(tensor: Tensor) -> str:
    """Return a text such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def describe_tensor(tensor: Tensor) -> str:
    """Return a text such as "float32 [4, 2]"."""
    return f"{dtype_name(tensor)} {list(tensor.shape)}"


def as_sendable(tensor: Tensor) -> Tensor:
    """Return the tensor's memory under a dtype that every backend can send."""
    flat = tensor.reshape(-1) if tensor.dim() == 0 else tensor
    return flat.view(torch.uint8) if tensor.dtype in (torch.bool, torch.int16) else flat


def flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory in one dim: Gloo takes a concatenation of pieces, but no stack."""
    return tensor.detach().view(-1)
