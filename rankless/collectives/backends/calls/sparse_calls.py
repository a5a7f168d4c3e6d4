"""all_reduce of sparse tensors, whose ranks have values at different places.

The ranks tell each other what they have, then gather all indices and values, and each adds them up in the order of
ranks: all get the same bits. Gloo does the same, and takes the same: tensors in the layout COO, and only SUM.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.calls.prepared_call import PreparedCall
from rankless.collectives.backends.calls.tensor_views import flatten_bytes
from rankless.collectives.backends.group_failure import make_mismatch_error
from rankless.collectives.backends.shared_movement import SharedMovement
from rankless.errors import CallError

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
