"""Lookups of rows in a parameter whose gradient is sparse, and sums of bags of them, as operators of a program.

Note [sparse lookups]: `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)` become two operators.
`weight_rows` looks rows up: in a tensor, or wherever the parameter's rows are (`RowReader`). So each worker looks up
the rows of its own ids. `weight_gradients` makes the sparse gradient. It has the rows' gradients of all workers in the
order of one device, so `.grad` and the optimizer's step are those of one device. The values travel as rows, never as a
dense gradient.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rankless.errors import TableError

NO_PADDING = -1
_SHOWN_IDS = 3


@runtime_checkable
class RowReader(Protocol):
    """Has the rows of a parameter that lie elsewhere. The parameter has it as the attribute `partition`."""

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int64, of shape (n,): a tensor of shape (n, dim) on a CPU."""
        ...


@torch.library.custom_op("rankless::weight_rows", mutates_args=())
def weight_rows(weight: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Return the rows of ids, of shape (*ids.shape, dim). The padding id has no gradient; -1 for none."""
    return run_weight_rows(weight, ids, padding)


@weight_rows.register_fake
def _(weight: Tensor, ids: Tensor, _padding: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def run_weight_rows(weight: Tensor, ids: Tensor, _padding: int) -> Tensor:
    """Look rows up, wherever they are. Raises TableError for an id without a row, if the ids are on a CPU."""
    reader = getattr(weight, "partition", None)
    rows, dim = weight.shape
    if isinstance(reader, RowReader):
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= rows):
            raise make_id_error(flat, rows)
        return reader.look_up(flat).to(weight.device).reshape(*ids.shape, dim)
    try:
        return torch.embedding(weight, ids)
    except IndexError as error:
        raise make_id_error(ids, rows) from error


def make_id_error(ids: Tensor, rows: int) -> TableError:
    """Return the error about ids without a row."""
    wrong = ids[(ids < 0) | (ids >= rows)].reshape(-1)
    names = ", ".join(map(str, wrong[:_SHOWN_IDS].tolist()))
    more = f" and {len(wrong) - _SHOWN_IDS} more" if len(wrong) > _SHOWN_IDS else ""
    return TableError(
        expected=f"ids from 0 to {rows - 1}, because the embedding has {rows} rows",
        found=f"{names}{more}",
        fix="make the embedding larger, check the ids, or use a table of rows, which takes any 64-bit id",
    )


@torch.library.custom_op("rankless::weight_gradients", mutates_args=())
def weight_gradients(gradients: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """Return the sparse gradient of a weight with that many rows, with an entry for each id but padding."""
    return run_weight_gradients(gradients, ids, rows, padding)


@weight_gradients.register_fake
def _(gradients: Tensor, ids: Tensor, rows: int, _padding: int) -> Tensor:
    dim = gradients.shape[-1]
    indices, values = ids.new_empty((1, 0), dtype=torch.int64), gradients.new_empty((0, dim))
    return torch.sparse_coo_tensor(indices, values, (rows, dim), check_invariants=False)


def run_weight_gradients(gradients: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """Make a sparse gradient, whose entries are in the order of the ids, as PyTorch's are."""
    dim = gradients.shape[-1]
    indices, values = ids.reshape(-1).to(torch.int64), gradients.reshape(-1, dim)
    if padding == NO_PADDING:
        values = values.clone()
    else:
        kept = indices != padding
        indices, values = indices[kept], values[kept]
    made: Tensor = torch.sparse_coo_tensor(indices.unsqueeze(0), values, (rows, dim), check_invariants=False)
    return made


@torch.library.custom_op("rankless::bag_numbers", mutates_args=())
def bag_numbers(offsets: Tensor, ids: Tensor) -> Tensor:
    """Return the number of each id's bag, int64, of shape (n,), from the place of each bag's first id."""
    count = ids.shape[0]
    if offsets.device.type == "cpu" and offsets.numel():
        is_wrong = int(offsets[0]) != 0 or int(offsets[-1]) > count or bool((offsets[1:] < offsets[:-1]).any())
        if is_wrong:
            raise TableError(
                expected=f"offsets of bags that begin with 0 and rise to at most {count}, the number of ids",
                found=str(offsets.tolist()),
                fix="pass the place of each bag's first id",
            )
    places = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets.contiguous(), places, right=True) - 1


@bag_numbers.register_fake
def _(_offsets: Tensor, ids: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0],), dtype=torch.int64)


def _save_ids(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  # PyTorch passes it by name
    weight, ids, ctx.padding = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, gradients: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return weight_gradients(gradients, ids, ctx.rows, ctx.padding), None, None


weight_rows.register_autograd(_backward, setup_context=_save_ids)
