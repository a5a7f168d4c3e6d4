"""`F.embedding` and `F.embedding_bag` as lookups of rows and sums of them, which can be divided between workers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor

from rankless.compiler.ir.row_lookups import NO_PADDING, bag_numbers, weight_rows

EMBEDDING = inspect.signature(F.embedding)
EMBEDDING_BAG = inspect.signature(F.embedding_bag)
ID_TYPES = (torch.int32, torch.int64)


def embed(*args: Any, **kwargs: Any) -> Tensor:
    """Replace `F.embedding`: rows with a sparse gradient are looked up by Rankless's operator."""
    settings = bind(EMBEDDING, args, kwargs)
    if not can_embed(settings):
        return F.embedding(*args, **kwargs)
    shorten_rows(settings["weight"], settings["input"], settings)
    return look_up(settings["weight"], settings["input"], settings["padding_idx"])


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def can_embed(settings: Mapping[str, Any]) -> bool:
    """Return whether rows are looked up by Rankless's operator. PyTorch's function does the rest, or raises."""
    ids, weight = settings["input"], settings["weight"]
    if not settings["sparse"] or settings["scale_grad_by_freq"] or ids.dtype not in ID_TYPES or weight.dim() != 2:
        return False
    return is_padding(settings["padding_idx"], weight)


def is_padding(padding: int | None, weight: Tensor) -> bool:
    """Return whether an id of padding, if there is one, has a row."""
    return padding is None or -weight.shape[0] <= padding < weight.shape[0]


def shorten_rows(weight: Tensor, ids: Tensor, settings: Mapping[str, Any]) -> None:
    """Limit the norms of the rows that are looked up, as PyTorch does before the lookup."""
    if settings["max_norm"] is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, ids.contiguous(), settings["max_norm"], settings["norm_type"])


def look_up(weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """Return the rows of ids, whose gradient is sparse."""
    rows: Tensor = weight_rows(weight, ids, NO_PADDING if padding is None else padding % weight.shape[0])
    return rows


def embed_bags(bags: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `F.embedding_bag`: look up the rows of an embedding, and sum those of each bag.

    PyTorch's operator would get the bags as one list with offsets, which cannot be sharded. Bags with dense gradients
    are replaced if they are the rows of a 2-d tensor. A list with offsets is replaced if gradients are sparse.
    """
    settings = bind(EMBEDDING_BAG, (bags, weight, *args), kwargs)
    if not can_embed_bags(settings):
        return F.embedding_bag(bags, weight, *args, **kwargs)
    padding, factors = settings["padding_idx"], settings["per_sample_weights"]
    if settings["sparse"]:
        shorten_rows(weight, bags, settings)
        rows = look_up(weight, bags, padding)
    else:
        rows = F.embedding(bags, weight, padding, scale_grad_by_freq=settings["scale_grad_by_freq"])
    if factors is not None:
        rows = rows * factors.unsqueeze(-1)
    is_counted = None if padding is None else (bags != padding % weight.shape[0]).unsqueeze(-1)
    if is_counted is not None:
        rows = torch.where(is_counted, rows, 0)
    if bags.dim() == 1:
        return sum_bags(rows, bags, is_counted, settings)
    total = rows.sum(1, dtype=rows.dtype)
    if settings["mode"] == "sum":
        return total
    return total / (max(bags.shape[1], 1) if is_counted is None else is_counted.sum(1).clamp(min=1))


def can_embed_bags(settings: Mapping[str, Any]) -> bool:
    """Return whether bags can be looked up row by row. PyTorch's function does the rest, or raises."""
    bags, weight = settings["input"], settings["weight"]
    mode, factors, offsets = settings["mode"], settings["per_sample_weights"], settings["offsets"]
    if mode == "max" or bags.dtype not in ID_TYPES or weight.dim() != 2:
        return False
    if factors is not None and (mode == "mean" or factors.shape != bags.shape or factors.dtype != weight.dtype):
        return False
    if not settings["sparse"]:
        return (
            bags.dim() == 2 and offsets is None and settings["max_norm"] is None and not settings["include_last_offset"]
        )
    if settings["scale_grad_by_freq"] or not is_padding(settings["padding_idx"], weight):
        return False
    if bags.dim() == 2:
        return offsets is None and not settings["include_last_offset"]
    has_offsets = offsets is not None and offsets.dim() == 1 and offsets.dtype in ID_TYPES
    return bags.dim() == 1 and has_offsets and (not settings["include_last_offset"] or offsets.shape[0] > 0)


def sum_bags(rows: Tensor, bags: Tensor, is_counted: Tensor | None, settings: Mapping[str, Any]) -> Tensor:
    """Return the sum or the mean of the rows of each bag, which begins at an offset."""
    offsets = settings["offsets"]
    count = offsets.shape[0]
    numbers = bag_numbers(offsets, bags)
    total = rows.new_zeros((count, rows.shape[1])).index_add(0, numbers, rows)
    if settings["mode"] == "mean":
        ones = rows.new_ones((bags.shape[0], 1)) if is_counted is None else is_counted.to(rows.dtype)
        total = total / rows.new_zeros((count, 1)).index_add(0, numbers, ones).clamp(min=1)
    return total[: count - 1] if settings["include_last_offset"] else total
