"""allgather, broadcast, alltoall, sparse tensors and objects against the results of one process."""

import pytest
import torch
from support.horovod_ranks import on_ranks

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
]


def rows(rank: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(count * 3).reshape(count, 3) + 10 * rank).to(dtype)


def gathered(hvd):
    for dtype in DTYPES:
        counts = [rank * 2 for rank in range(hvd.size())]
        own = rows(hvd.rank(), counts[hvd.rank()], dtype)
        expected = torch.cat([rows(rank, count, dtype) for rank, count in enumerate(counts)])
        assert torch.equal(hvd.allgather(own), expected)
        assert torch.equal(hvd.synchronize(hvd.allgather_async(own, name="rows")), expected)
        for result in (
            hvd.grouped_allgather([own, own]),
            hvd.synchronize(hvd.grouped_allgather_async([own, own], name="both")),
        ):
            assert isinstance(result, list)
            assert all(torch.equal(each, expected) for each in result)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_allgather_concatenates_uneven_rows_in_rank_order(size):
    on_ranks(size, gathered)


def broadcasts(hvd):
    for dtype in DTYPES:
        for root in range(hvd.size()):
            own, expected = rows(hvd.rank(), 2, dtype), rows(root, 2, dtype)
            assert torch.equal(hvd.broadcast(own, root), expected)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(own, root_rank=root)), expected)
            assert torch.equal(own, rows(hvd.rank(), 2, dtype))
            copy = own.clone()
            assert hvd.broadcast_(copy, root) is copy
            assert torch.equal(copy, expected)
            handle = hvd.broadcast_async_(own, root, name="own")
            hvd.synchronize(handle)
            assert torch.equal(own, expected)
    number = torch.tensor(float(hvd.rank()))
    assert hvd.broadcast(number, 1) == 1.0


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_broadcast_copies_the_roots_values_to_all_ranks(size):
    on_ranks(size, broadcasts)


def exchanged(hvd):
    n, rank = hvd.size(), hvd.rank()
    whole = [rows(other, 2 * n) for other in range(n)]
    even = torch.cat([part[2 * rank : 2 * rank + 2] for part in whole])
    assert torch.equal(hvd.alltoall(whole[rank]), even)
    counts = [[(sender + receiver) % 3 for receiver in range(n)] for sender in range(n)]
    starts = [[sum(row[:place]) for place in range(n)] for row in counts]
    mine = torch.cat([whole[s][starts[s][rank] : starts[s][rank] + counts[s][rank]] for s in range(n)])
    received_counts = [counts[sender][rank] for sender in range(n)]
    for splits in (counts[rank], torch.tensor(counts[rank], dtype=torch.int32)):
        output, received = hvd.alltoall(whole[rank], splits)
        assert torch.equal(output, mine)
        assert received.tolist() == received_counts
        assert received.dtype == torch.int32
    output, received = hvd.synchronize(hvd.alltoall_async(whole[rank], splits=counts[rank], name="rows"))
    assert torch.equal(output, mine)
    assert received.tolist() == received_counts


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_alltoall_sends_rows_according_to_splits(size):
    on_ranks(size, exchanged)


def sparse_part(rank: int) -> torch.Tensor:
    places = torch.tensor([[rank, rank + 1, 3], [0, 1, 2]])
    return torch.sparse_coo_tensor(places, torch.arange(1.0, 4.0, dtype=torch.float64) * (rank + 1), (6, 3))


def sparse(hvd, of_sum):
    op = hvd.Sum if of_sum else hvd.Average
    handle = hvd.sparse_allreduce_async(sparse_part(hvd.rank()), "table", op)
    assert callable(handle)
    whole = sum(sparse_part(rank).to_dense() for rank in range(hvd.size()))
    result = handle()
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), whole if of_sum else whole / hvd.size())
    again = hvd.sparse_allreduce_async(sparse_part(hvd.rank()), "table", hvd.Sum)
    assert torch.equal(hvd.synchronize(again).to_dense(), whole)


@pytest.mark.parametrize("of_sum", [True, False])
def test_a_sparse_allreduce_has_a_handle_to_be_called(of_sum):
    on_ranks(2, sparse, of_sum)


def objects(hvd):
    own = {"rank": hvd.rank(), "long": "x" * 1000 * hvd.rank(), "function": lambda: hvd.rank()}
    every = hvd.allgather_object(own, name="objects")
    assert [each["rank"] for each in every] == list(range(hvd.size()))
    assert [len(each["long"]) for each in every] == [1000 * rank for rank in range(hvd.size())]
    only_there = hvd.broadcast_object({1, 2} if hvd.rank() == 1 else None, root_rank=1)
    return only_there, hvd.broadcast_object(own, name="root's")["rank"], hvd.allgather_object(None)


def test_objects_are_broadcast_to_ranks_that_pass_none():
    assert on_ranks(3, objects) == [({1, 2}, 0, [None] * 3)] * 3


def out_of_order(hvd):
    names = ["a", "b", "c", "d"]
    handles = {}
    for name in names if hvd.rank() == 0 else reversed(names):
        handles[name] = hvd.allreduce_async(torch.full((3,), float(ord(name))), name=name, op=hvd.Sum)
    broadcast = hvd.broadcast_async(torch.tensor([hvd.rank()]), 1, name="a")
    results = {name: hvd.synchronize(handle)[0].item() for name, handle in handles.items()}
    return sorted(results.items()), hvd.synchronize(broadcast).item()


def test_named_operations_run_in_any_order_and_kinds_share_names():
    expected = [(name, ord(name) * 2.0) for name in "abcd"]
    assert on_ranks(2, out_of_order) == [(expected, 1)] * 2


def polled(hvd):
    handle = hvd.allreduce_async(torch.ones(4), name="x")
    while not hvd.poll(handle):
        pass
    result = hvd.synchronize(handle)
    return result.tolist(), hvd.synchronize(handle), hvd.synchronize(10_000)


def test_poll_reports_completion_and_a_handle_is_valid_once():
    assert on_ranks(2, polled) == [([1.0] * 4, None, None)] * 2


def joining(hvd):
    seen = []
    for step in range(2 if hvd.rank() == 0 else 4):
        seen.append(hvd.allreduce(torch.ones(2, dtype=torch.float64), name=f"step.{step}")[0].item())
    return seen, hvd.join()


def test_a_joined_rank_counts_as_zeros_and_all_ranks_get_the_last_rank():
    (first, last_of_first), (second, last_of_second) = on_ranks(2, joining)
    assert first == [1.0, 1.0]
    assert second == [1.0, 1.0, 0.5, 0.5]
    assert last_of_first == last_of_second == 1
