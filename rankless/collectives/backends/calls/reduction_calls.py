"""The checks of the arguments of all_reduce, reduce and reduce_scatter, and what each then runs.

all_reduce of sparse tensors, whose ranks have values at different places.

The ranks tell each other what they have, then gather all indices and values, and each adds them up in the order of
ranks: all get the same bits. Gloo does the same, and takes the same: tensors in the layout COO, and only SUM.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.calls.call_arguments import (
    PreparedCall,
    flatten,
    flatten_bytes,
    is_plain,
    require_count,
    require_dense,
    require_one_dtype,
    require_values,
    write_back,
)
from rankless.collectives.backends.fused_reductions import FusedCall, FusedReductions
from rankless.collectives.backends.group_failure import make_mismatch_error
from rankless.collectives.backends.reductions import find_reduced_dtype, view_as_reduced
from rankless.collectives.backends.shared_movement import SharedMovement
from rankless.collectives.backends.shared_reductions import SharedReductions
from rankless.errors import CallError


def prepare_all_reduce(reductions: SharedReductions, tensors: Sequence[Tensor], operation: Any) -> PreparedCall:
    """Reduce tensors of one dtype over all ranks, each in place.

    Raises:
        CallError: A tensor is not dense and on the CPU, or the reduction does not take its dtype.
    """
    if len(tensors) == 1 and is_plain(tensors[0]) and not tensors[0].dtype.is_complex:
        (tensor,) = tensors
        reduction = reductions.get_reduction(operation, tensor.dtype)
        return PreparedCall(lambda: reductions.all_reduce(flatten(tensor), reduction), tensors, list(tensors))
    require_dense(tensors)
    require_one_dtype(tensors)
    reduction = reductions.get_reduction(operation, find_reduced_dtype(tensors[0].dtype, operation))

    def run_one() -> None:
        flat = flatten(tensors[0])
        reductions.all_reduce(view_as_reduced(flat), reduction)
        write_back(tensors[0], flat)

    def run_several() -> None:
        flat = torch.cat([flatten(tensor) for tensor in tensors])
        reductions.all_reduce(view_as_reduced(flat), reduction)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return PreparedCall(run_one if len(tensors) == 1 else run_several, tensors, list(tensors))


class FusedTensors(NamedTuple):
    """What `prepare_fused_all_reduce` reduces: the inputs, and the outputs of the same lengths."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def prepare_fused_all_reduce(
    reductions: SharedReductions,
    fused: FusedReductions,
    tensors: FusedTensors,
    operation: Any,
    *,
    before: Callable[[Tensor], object],
    after: Callable[[Tensor], object],
) -> PreparedCall:
    """Reduce tensors over all ranks into others, as if they were one. `before` and `after` are as in `FusedCall`.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than its input.
    """
    inputs, outputs = tensors
    require_count(outputs, len(inputs), "outputs")
    require_dense([*inputs, *outputs])
    require_one_dtype([*inputs, *outputs])
    for value, output in zip(inputs, outputs, strict=True):
        require_values(output, value.numel(), "an output of an all_reduce")
    reduction = reductions.get_reduction(operation, inputs[0].dtype)

    def run() -> None:
        flats = [flatten(output) for output in outputs]
        fused.all_reduce(FusedCall([flatten(value) for value in inputs], flats, reduction, before, after))
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


def prepare_reduce(reductions: SharedReductions, tensor: Tensor, operation: Any, root: int) -> PreparedCall:
    """Reduce a tensor over all ranks, into the root's. Raises as `prepare_all_reduce`."""
    require_dense([tensor])
    reduction = reductions.get_reduction(operation, find_reduced_dtype(tensor.dtype, operation))

    def run() -> None:
        flat = flatten(tensor)
        reductions.reduce(view_as_reduced(flat), reduction, root)
        if reductions.rank == root:
            write_back(tensor, flat)

    return PreparedCall(run, [tensor], [tensor])


def prepare_reduce_scatter(
    reductions: SharedReductions, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], operation: Any
) -> PreparedCall:
    """Make calls of reduce_scatter. The inputs of each are a tensor for each rank, or one for all.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than what is reduced into it.
    """
    size = reductions.size
    require_dense([*outputs, *(value for values in inputs for value in values)])
    calls = []
    for output, values in zip(outputs, inputs, strict=True):
        if len(values) == 1:
            require_values(values[0], size * output.numel(), "the input of a reduce_scatter")
        else:
            require_values(output, values[reductions.rank].numel(), "the output of a reduce_scatter")
        require_one_dtype([output, *values])
        reduction = reductions.get_reduction(operation, find_reduced_dtype(output.dtype, operation))
        calls.append((output, values, reduction))

    def run() -> None:
        for output, parts, reduction in calls:
            flat, values = flatten(output), [flatten(part) for part in parts]
            if len(values) == 1 and size > 1:
                values = list(values[0].split(max(1, len(flat)))) if len(flat) else [flat] * size
            reductions.reduce_scatter(view_as_reduced(flat), list(map(view_as_reduced, values)), reduction)
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


_DESCRIPTION_BYTES = 1024


def prepare_sparse_all_reduce(
    movement: SharedMovement, tensor: Tensor, operation: Any, names: Sequence[int]
) -> PreparedCall:
    """Replace a sparse tensor by the sum over all ranks, which is coalesced.

    Args:
        movement: The collectives of the group.
        tensor: The tensor, in the layout COO and on the CPU.
        operation: A `ReduceOp`, which must be SUM.
        names: The ranks of the group as errors name them.

    Raises:
        CallError: Another reduction, or a tensor that is not on the CPU.
    """
    kind = getattr(operation, "op", operation)
    if kind != dist.ReduceOp.SUM or not tensor.is_cpu:
        raise CallError(
            expected="SUM of a sparse tensor on the CPU",
            found=f"{getattr(kind, 'name', kind)} of one on {tensor.device}",
            fix="choose SUM, or make the tensor dense",
        )

    # Not within the collective, because an error there ends the group: PyTorch cannot add sparse values of all dtypes.
    own = tensor.detach().coalesce()

    def run() -> None:
        counts = _compare(movement, own, names)
        indices, values = own.indices(), own.values()
        index_rows = [indices.new_empty(count, own.sparse_dim()) for count in counts]
        value_rows = [values.new_empty(count, *values.shape[1:]) for count in counts]
        for mine, rows in ((indices.t(), index_rows), (values, value_rows)):
            movement.all_gather(flatten_bytes(mine), [flatten_bytes(row) for row in rows])
        total = torch.sparse_coo_tensor(
            torch.cat(index_rows).t(), torch.cat(value_rows), own.shape, check_invariants=False
        ).coalesce()
        _replace(tensor, total)

    return PreparedCall(run, [tensor], [tensor])


def _replace(tensor: Tensor, total: Tensor) -> None:
    """Give a tensor the values of another one.

    New values of a sparse view do not reach the tensor that it was made of. `torch.distributed.all_reduce` makes such a
    view of complex values.
    """
    base = tensor._base if tensor._is_view() else None
    with torch.no_grad():
        if base is not None and base.dtype.is_complex and not tensor.dtype.is_complex:
            values = torch.view_as_complex(total.values())
            base.copy_(torch.sparse_coo_tensor(total.indices(), values, base.shape, is_coalesced=True))
        tensor.copy_(total)


def _compare(movement: SharedMovement, own: Tensor, names: Sequence[int]) -> list[int]:
    """Return how many values each rank has. Raises `CollectiveError` on all ranks if their tensors do not match."""
    kind = f"all_reduce(SUM, sparse {str(own.dtype).removeprefix('torch.')} of shape {tuple(own.shape)}"
    text = f"{kind}, {own.dense_dim()} dense dims);{own._nnz()}".encode().ljust(_DESCRIPTION_BYTES)
    rows = torch.empty(movement.size, _DESCRIPTION_BYTES, dtype=torch.uint8, device="cpu")
    movement.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8), list(rows))
    found = [bytes(row.tolist()).decode().rstrip().split(";") for row in rows]
    for rank, (description, _) in enumerate(found):
        if description != found[0][0]:
            raise make_mismatch_error(names[rank], names[0], found=description, own=found[0][0])
    return [int(count) for _, count in found]
