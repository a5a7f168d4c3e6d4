"""Pieces of tensors, and groups of them in flat memory."""

import pytest
import torch

from rankless.ownership.shard_layout import ShardGroup, ShardLayout, divide_evenly
from rankless.parallel.tensor_placement import Shard


def transposed(*shape):
    return torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))


TENSORS = {
    "a matrix": torch.randn(7, 3),
    "an even matrix": torch.randn(12, 4),
    "a transposed matrix": transposed(5, 8),
    "an outer dim of size one": torch.randn(1, 9, 2),
    "a vector": torch.randn(5),
    "images": torch.randn(6, 4, 5, 5),
    "channels_last images": torch.randn(6, 4, 5, 5).to(memory_format=torch.channels_last),
    "complex numbers": torch.randn(8, 3, dtype=torch.complex64),
}


def divided(tensor, ranks):
    order = ShardLayout.of(tensor, Shard(0, ())).order
    division = divide_evenly(tuple(tensor.shape), order, ranks)
    assert division is not None
    return ShardLayout.of(tensor, Shard(*division))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TENSORS)
def test_pieces_make_up_the_tensor_and_lie_in_memory_as_it_does(name, ranks):
    whole = TENSORS[name]
    layout = divided(whole, ranks)
    assert [layout.strides[dim] for dim in range(whole.dim()) if whole.shape[dim] != 1] == [
        whole.stride(dim) for dim in range(whole.dim()) if whole.shape[dim] != 1
    ]
    pieces = [layout.copy_shard(whole, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(pieces, layout.placement.dim), whole)
    for rank, piece in enumerate(pieces):
        assert piece.untyped_storage().nbytes() == piece.nbytes
        assert tuple(piece.shape) == layout.shard_shape(rank)
        assert sorted(piece.stride()) == sorted(layout.shard_strides(rank))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TENSORS)
def test_a_group_joins_and_splits_tensors_with_uneven_pieces_and_workers_without_any(name, ranks):
    whole = TENSORS[name]
    other = torch.randn(3, 4).to(whole.dtype)
    on_one_worker = ShardLayout.of(other, Shard(0, (0,) * (ranks - 1) + (3,)))
    for layouts, wholes in (
        ((divided(whole, ranks),), (whole,)),
        ((divided(whole, ranks), on_one_worker), (whole, other)),
    ):
        group = ShardGroup(layouts, ranks)
        flat = torch.full((group.flat_size,), float("nan")).to(whole.dtype)
        group.join_wholes(wholes, flat)
        chunks = [
            group.join_shards([layout.copy_shard(item, rank) for layout, item in zip(layouts, wholes, strict=True)])
            for rank in range(ranks)
        ]
        for gathered in (flat, torch.cat(chunks)):
            for found, wanted in zip(group.split_wholes(gathered), wholes, strict=True):
                assert torch.equal(found, wanted)
        for rank, chunk in enumerate(flat.view(ranks, -1)):
            for layout, item, piece in zip(layouts, wholes, group.view_shards(chunk, rank), strict=True):
                assert torch.equal(piece, layout.get_shard(item, rank))


@pytest.mark.parametrize(
    ("shape", "ranks", "expected"),
    [
        ((10, 784), 2, (0, (5, 5))),
        ((50257, 768), 4, (0, (12565, 12564, 12564, 12564))),
        ((6, 1, 5, 5), 4, (0, (2, 2, 1, 1))),
        ((3, 100), 2, (1, (50, 50))),
        ((1, 9), 4, (1, (3, 2, 2, 2))),
        ((3,), 4, None),
        ((), 2, None),
    ],
)
def test_the_outermost_dim_that_is_nearly_even_is_divided(shape, ranks, expected):
    assert divide_evenly(shape, range(len(shape)), ranks) == expected


@pytest.mark.parametrize("name", TENSORS)
def test_copies_have_the_rows_of_the_worker_that_has_all_and_are_no_further_ones(name):
    whole = TENSORS[name]
    layout = ShardLayout.of(whole, Shard(0, (0, 0, whole.shape[0], 0)), copies=(3,))
    assert layout.holders == (2, 3)
    pieces = [layout.copy_shard(whole, rank) for rank in range(4)]
    assert [piece.shape[0] for piece in pieces] == [0, 0, whole.shape[0], whole.shape[0]]
    assert layout.list_ranges(3) == layout.list_ranges(2) == [(0, whole.shape[0])]
    assert torch.equal(pieces[3], whole)
    group = ShardGroup((layout,), 4)
    (found,) = group.split_wholes(torch.cat([group.join_shards([piece]) for piece in pieces]))
    assert torch.equal(found, whole)
