"""Reading and writing by index."""

from collections.abc import Callable
from typing import Any

import torch
from operator_cases import Case, batch_last, labels_of, numbers, split
from torch import Tensor

aten = torch.ops.aten

INDEXING = {
    "gather": Case(lambda x: x.gather(1, labels_of(x, 6)[:, None]).square() + x.gather(0, (x > 0).long()).sum()),
    "scatter": Case(lambda x: torch.zeros_like(x).scatter(1, labels_of(x, 6)[:, None], x[:, :1]).square()),
    "scatter of a value": Case(lambda x: x.scatter(1, labels_of(x, 6)[:, None], 2.0).square()),
    "scatter add": Case(lambda x: x.scatter_add(1, (x > 0).long(), x.square()).square()),
    "scatter add onto the batch": Case(lambda x: x.scatter_add(0, (x > 0).long(), x.square()).square()),
    "index select": Case(lambda x: x.index_select(1, torch.tensor([0, 5, 5])).square()),
    "index select of rows": Case(lambda x: x.index_select(0, torch.tensor([0, 5, 5, 1])).square()),
    "index select by the batch": Case(lambda x: x.sum(0).index_select(0, labels_of(x, 6)).square()),
    "index": Case(lambda x: x[:, torch.tensor([0, 5, 5])].square()),
    "index by the batch": Case(lambda x: x.sum(0)[labels_of(x, 6)].square()),
    "index of rows": Case(lambda x: x[torch.tensor([3, 0, 0])].square()),
    "index by two": Case(lambda x: x.sum(0)[labels_of(x, 2), labels_of(x, 3)].square(), (2, 3)),
    "index of rows and columns": Case(lambda x: x[torch.arange(len(x)), labels_of(x, 6)].square()),
    "unsafe index": Case(lambda x: aten._unsafe_index(x.sum(0), [labels_of(x, 6)]).square()),
    "index by a mask": Case(lambda x: x[x[:, 0] > 0].square().sum(0) * x),
    "index by places": Case(lambda x: x.index_put(torch.where(x > 1), torch.tensor(0.5)) * x.square()),
    "masked select and scatter": Case(lambda x: x.masked_scatter(x > 0, x.masked_select(x > 0).square()).square()),
    "index put": Case(lambda x: x.sum(0).index_put((labels_of(x, 6),), x[:, 0], accumulate=True).square()),
    "index put over": Case(lambda x: x.index_put((torch.tensor([1, 4]),), numbers(2, 6)).square()),
    "unsafe index put": Case(
        lambda x: aten._unsafe_index_put(x.sum(0), [labels_of(x, 6)], x[:, 0], True).square(),
    ),
}


def assign(*places: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that assigns to places of a copy of x, and squares it."""

    def function(x: Tensor) -> Tensor:
        target = x.clone()
        target[places] = x[places].cos() * 2
        return target.square()

    return function


SPLIT_INDEXING = {
    "range and labels": split(lambda x: x[torch.arange(x.shape[0]), labels_of(x, 6)].square()),
    "range and labels below zero": split(lambda x: x[torch.arange(x.shape[0]), -1 - labels_of(x, 3)].square()),
    "range and labels around a dim": split(lambda x: x[torch.arange(x.shape[0]), :, labels_of(x, 4)].square(), (5, 4)),
    "range and several labels": split(lambda x: x[torch.arange(x.shape[0])[:, None], (x > 0).long()].square()),
    "range in the last dim": split(batch_last(lambda x: x[labels_of(x.t(), 6), torch.arange(x.shape[1])].square())),
    "grid of ranges": split(lambda x: x[torch.arange(x.shape[0]).view(-1, 1), torch.arange(6)[None]].square()),
    "grid of ranges across a square": split(
        lambda x: x[torch.arange(x.shape[0])[None], torch.arange(x.shape[0])[:, None]].square(), (12,)
    ),
    "range and labels that are written": split(
        lambda x: x.index_put((torch.arange(x.shape[0]), labels_of(x, 6)), x[:, 0]).square()
    ),
    "range and labels that get a number": split(
        lambda x: x.index_put((torch.arange(x.shape[0]), labels_of(x, 6)), torch.tensor(3.0), accumulate=True).square()
    ),
    "columns that are assigned": split(assign(slice(None), torch.tensor([1, 4]))),
    "a range of columns that is assigned": split(assign(slice(None), slice(1, 3))),
    "one column that is assigned": split(assign(slice(None), 2)),
    "triangle of every matrix": split(lambda x: x[:, *torch.tril_indices(4, 4)].square(), (4, 4)),
    "counts by label": split(
        lambda x: (
            x
            * torch.zeros(6, dtype=torch.long).index_put(
                (labels_of(x, 6),), torch.ones(1, dtype=torch.long), accumulate=True
            )
        )
    ),
    "scatter add by label": split(
        lambda x: torch.zeros(4, 6).scatter_add(0, labels_of(x, 4)[:, None].expand(-1, 6), x).square()
    ),
    "scatter with reductions": split(
        lambda x: (
            sum(x.scatter_reduce(1, (x > 0).long(), x.square(), how).square() for how in ("sum", "amax", "mean"))
            + x * x.detach().scatter(1, (x > 0).long(), 2.0, reduce="multiply")
        )
    ),
    "scatter of a tensor with a reduction": split(
        lambda x: x * x.detach().scatter(1, (x > 0).long(), x.detach(), reduce="add")
    ),
    "index add to columns": split(lambda x: x.index_add(-1, torch.tensor([0, 3, 3]), x[:, :3], alpha=2).square()),
    "index add by label": split(lambda x: x.sum(0).index_add(0, labels_of(x, 6), x[:, 1], alpha=2).square()),
    "index reduce": split(lambda x: x.index_reduce(1, torch.tensor([0, 3, 0]), x[:, :3].square(), "amax").square()),
    "index copy and fill": split(
        lambda x: (
            x.index_copy(1, torch.tensor([0, 3]), x[:, :2] * 2).square()
            + x.index_fill(1, torch.tensor([0, 3]), 2.0)
            + x.detach().index_fill(1, torch.tensor([2]), torch.tensor(4.0)) * x
        )
    ),
    "take": split(lambda x: (x.sum(0) * numbers(6)).take(labels_of(x, 6)).square()),
    "search in sorted rows": split(
        lambda x: (
            x * torch.searchsorted(numbers(5).sort()[0], x.detach())
            + x * torch.searchsorted(x.detach().sort(1)[0], x.detach().cos())
            + x * torch.searchsorted(x.detach(), x.detach().cos(), sorter=x.argsort(1))
            + x * torch.bucketize(x.detach().float(), numbers(5).float().sort()[0])
        )
    ),
}
