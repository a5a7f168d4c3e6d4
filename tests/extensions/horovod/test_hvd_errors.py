"""Invalid calls raise Horovod's errors: on one rank at once, or on all ranks if their requests do not match."""

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks

import rankless.extensions.horovod.torch as hvd_before_init


def local_errors(hvd):
    ones = torch.ones(3)
    table = torch.ones(4, 2)
    int32 = torch.int32
    return {
        "both": error_of(lambda: hvd.allreduce(ones, average=True, op=hvd.Sum)),
        "strided": error_of(lambda: hvd.allreduce(table.t())),
        "complex": error_of(lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64))),
        "sparse": error_of(lambda: hvd.allgather(torch.ones(2, 2).to_sparse())),
        "sum": error_of(lambda: hvd.alltoall(table, torch.tensor([3, 2], dtype=int32))),
        "dtype": error_of(lambda: hvd.alltoall(table, torch.tensor([2, 2]))),
        "even": error_of(lambda: hvd.alltoall(ones)),
        "entries": error_of(lambda: hvd.alltoall(table, [4])),
        "dims": error_of(lambda: hvd.alltoall(table, torch.ones(2, 2, dtype=int32))),
        "negative": error_of(lambda: hvd.alltoall(table, [-1, 2])),
        "number": error_of(lambda: hvd.allgather(torch.tensor(1.0))),
        "scattered number": error_of(lambda: hvd.reducescatter(torch.tensor(1.0))),
        "scattered maximum": error_of(lambda: hvd.reducescatter(table, op=hvd.Max)),
        "root": error_of(lambda: hvd.broadcast(ones, 2)),
        "empty group": error_of(lambda: hvd.grouped_allreduce_async([])),
        "unknown handle": error_of(lambda: hvd.poll(4711)),
        "no mpi": error_of(hvd.mpi_threads_supported),
        "parameters": error_of(lambda: hvd.broadcast_parameters(3, root_rank=0)),
        "no tensor": error_of(lambda: hvd.allreduce(0.5, name="loss")),
        "no tensor by name": error_of(lambda: hvd.broadcast_(tensor=[1, 2], root_rank=0)),
        "no tensor in a group": error_of(lambda: hvd.grouped_allreduce([ones, None])),
        "lbfgs": error_of(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(ones)]), 0)),
    }


MAKE = "fix:      torch.tensor(value) makes one; hvd.allgather_object and hvd.broadcast_object take other objects"
LOCAL = {
    "no tensor": (
        "TypeError",
        f"\nexpected: a torch.Tensor for hvd.allreduce\nfound:    0.5, of type float\n{MAKE}",
    ),
    "no tensor by name": (
        "TypeError",
        f"\nexpected: a torch.Tensor for hvd.broadcast_\nfound:    [1, 2], of type list\n{MAKE}",
    ),
    "no tensor in a group": (
        "TypeError",
        f"\nexpected: torch.Tensors for hvd.grouped_allreduce\nfound:    None, of type NoneType\n{MAKE}",
    ),
    "both": ("ValueError", "The op parameter supersedes average. Please provide only one of them."),
    "strided": ("ValueError", "Tensor is required to be contiguous."),
    "complex": ("ValueError", "Tensor type torch.ComplexFloatTensor is not supported."),
    "sparse": ("ValueError", "Tensor type torch.sparse.FloatTensor is not supported."),
    "sum": ("ValueError", "Sum of splits entries is greater than the first dimension of tensor."),
    "dtype": ("ValueError", "alltoall expects splits to contain 32-bit integer elements."),
    "even": (
        "ValueError",
        "splits not provided, but first dimension of tensor is not an even multiple of the number of workers.",
    ),
    "entries": ("ValueError", "Number of entries in splits does not equal number of workers."),
    "dims": ("ValueError", "alltoall expects a 1D splits tensor"),
    "negative": ("ValueError", "Entries of splits cannot be negative: (-1, 2)."),
    "number": (
        "IndexError",
        "\nexpected: a tensor with a first dimension, along which allgather concatenates\n"
        "found:    a tensor of 0 dimensions and type torch.FloatTensor\n"
        "fix:      tensor.reshape(1) has one; hvd.allgather_object gathers plain numbers",
    ),
    "scattered number": (
        "HorovodInternalError",
        "Reducescatter needs a tensor with a first dimension; found one of 0 dimensions.",
    ),
    "scattered maximum": ("HorovodInternalError", "Reducescatter supports Average and Sum only; found Max."),
    "root": ("ValueError", "broadcast received invalid root rank 2 for provided process set"),
    "empty group": ("ValueError", "A grouped allreduce needs at least one tensor."),
    "unknown handle": ("ValueError", "Handle 4711 was not created or has been cleared."),
    "no mpi": ("ValueError", "Horovod MPI is not enabled; Please make sure it's installed and enabled."),
    "parameters": ("ValueError", "invalid params of type: <class 'int'>"),
    "lbfgs": ("ValueError", "cannot broadcast torch.optim.LBFGS state"),
}


def test_a_call_that_one_rank_finds_invalid_raises_at_once():
    for found in on_ranks(2, local_errors):
        assert found == LOCAL


def duplicate(hvd):
    handle = hvd.allreduce_async(torch.ones(3), name="x") if hvd.rank() == 0 else None
    again = error_of(lambda: hvd.allreduce_async(torch.ones(3), name="x")) if hvd.rank() == 0 else None
    other_kind = hvd.broadcast(torch.ones(3), 0, name="x").tolist()
    result = hvd.synchronize(handle) if handle else hvd.allreduce(torch.ones(3), name="x")
    return again, other_kind, result.tolist()


def test_a_name_in_use_is_rejected_until_its_operation_is_done():
    text = (
        "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
        "currently being processed.  If you want to request another tensor, use a different tensor name."
    )
    first, second = on_ranks(2, duplicate)
    assert first == (("ValueError", text), [1.0] * 3, [1.0] * 3)
    assert second == (None, [1.0] * 3, [1.0] * 3)


def across(hvd, mismatch):
    rank = hvd.rank()
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(3 + rank), name="x"),
        "op": lambda: hvd.allreduce(torch.ones(3), name="x", op=hvd.Average if rank else hvd.Sum),
        "factors": lambda: hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum, prescale_factor=1.0 + rank),
        "root": lambda: hvd.broadcast(torch.ones(3), rank, name="x"),
        "dims": lambda: hvd.allgather(torch.ones((2,) * (2 - rank)), name="x"),
        "columns": lambda: hvd.allgather(torch.ones(2, 3 + rank), name="x"),
        "dtype": lambda: hvd.allreduce(torch.ones(3, dtype=torch.float32 if rank else torch.float64), name="x"),
    }
    found = error_of(calls[mismatch])
    return found, hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()


ACROSS = {
    "shape": "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], "
    "but another rank sent a tensor of shape [4].",
    "op": "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 0.",
    "factors": "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), "
    "but another rank sent factors (2, 1).",
    "root": "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
    "dims": "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, "
    "but another rank sent a tensor of rank 1.",
    "columns": "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, "
    "but another rank sent a tensor with dimension 1 equal to 4.",
    "dtype": "Mismatched data types: One rank had type float64, but another rank had type float32.",
}


@pytest.mark.parametrize("mismatch", ACROSS)
def test_mismatched_ranks_raise_the_same_error_and_continue(mismatch):
    kind = {"root": "broadcast", "dims": "allgather", "columns": "allgather"}.get(mismatch, "allreduce")
    text = f"{ACROSS[mismatch]} Operation {kind}.x: the first is rank 0, the other rank 1."
    found = (("HorovodInternalError", text), [2.0, 2.0])
    assert on_ranks(2, across, mismatch) == [found, found]


def adasum_on_three(hvd):
    return error_of(lambda: hvd.allreduce(torch.ones(3), op=hvd.Adasum))


def test_adasum_requires_a_power_of_two():
    text = "Running Adasum with non-power of 2 ranks is not supported yet."
    assert on_ranks(3, adasum_on_three) == [("NotImplementedError", text)] * 3


def adasum_of_two(hvd):
    vectors = [torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([-2.0, 0.5, 1.0]).double()]
    result = hvd.allreduce(vectors[hvd.rank()], op=hvd.Adasum)
    one, other = vectors
    shared = one @ other
    expected = one * (1 - shared / (2 * one @ one)) + other * (1 - shared / (2 * other @ other))
    torch.testing.assert_close(result, expected)


def test_adasum_adds_orthogonal_and_averages_parallel_gradients():
    on_ranks(2, adasum_of_two)


def test_nothing_works_before_init():
    text = "Horovod has not been initialized; use hvd.init()."
    hvd = hvd_before_init
    calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.barrier, hvd.join]
    calls += [lambda: hvd.allreduce(torch.ones(2)), lambda: hvd.start_timeline("x"), hvd.stop_timeline]
    for call in calls:
        assert error_of(call) == ("ValueError", text)
    assert hvd.is_initialized() is False
    assert hvd.synchronize(1) is None


def test_the_old_average_argument_is_accepted_with_a_warning():
    assert on_ranks(2, warned) == [([2.0, 2.0], 1)] * 2


def warned(hvd):
    with pytest.warns(DeprecationWarning, match="average") as caught:
        result = hvd.allreduce(torch.ones(2), average=False)
    return result.tolist(), len(caught)
