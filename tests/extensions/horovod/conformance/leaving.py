"""One process alone, and ranks that leave before the others."""

import os

import horovod.torch as hvd
import torch
from raised import raised

from rankless.errors import JoinError

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)


def alone() -> None:
    """Every operation on one process, which is rank 0 of 1."""
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    for count in (4, 40_000):
        given = torch.arange(count, dtype=torch.float64).requires_grad_()
        for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
            assert torch.equal(hvd.allreduce(given, op=op), given)
        assert torch.equal(hvd.allreduce(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), given / 2)
        assert torch.equal(hvd.grouped_allreduce([given, given])[1], given)
        assert torch.equal(hvd.allgather(given), given)
        assert torch.equal(hvd.grouped_allgather([given])[0], given)
        assert torch.equal(hvd.broadcast(given, 0), given)
        assert torch.equal(hvd.alltoall(given), given)
        rows, received = hvd.alltoall(given, [count - 1])
        assert torch.equal(rows, given[:-1])
        assert received.tolist() == [count - 1]
        assert torch.equal(hvd.reducescatter(given), given)
        assert torch.equal(hvd.grouped_reducescatter([given])[0], given)
        (hvd.allreduce(given) + hvd.allgather(given) + hvd.broadcast(given, 0)).sum().backward()
        assert given.grad is not None
        assert torch.equal(given.grad, torch.full((count,), 3.0, dtype=torch.float64))
        in_place = torch.ones(count)
        assert hvd.synchronize(hvd.allreduce_async_(in_place)) is in_place
    part = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (3,), check_invariants=False)
    assert hvd.sparse_allreduce_async(part, "sparse", hvd.Sum)().to_dense().tolist() == [0.0, 1.0, 0.0]
    assert hvd.allgather_object("me") == ["me"]
    assert hvd.broadcast_object("me") == "me"
    hvd.barrier()
    assert hvd.join() == 0


def check_every_operation_alone():
    """init() with nobody else: all operations work."""
    rank = hvd.rank()
    hvd.barrier()
    hvd.shutdown()
    hvd.init(comm=[rank])
    alone()
    hvd.shutdown()
    hvd.init()


def check_one_rank_that_leaves_before_the_others():
    """Their operations raise that Horovod has been shut down, those that wait and those that come later."""
    last = hvd.rank() == hvd.size() - 1
    waiting = None if last else hvd.allreduce_async(torch.ones(3), name="awaited")
    hvd.barrier()
    if last:
        hvd.shutdown()
    else:
        assert waiting is not None
        assert raised(hvd.HorovodInternalError, lambda: hvd.synchronize(waiting)) == SHUT_DOWN
        assert raised(hvd.HorovodInternalError, lambda: hvd.allgather(torch.ones(3))) == SHUT_DOWN
        assert hvd.is_initialized()
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_a_forked_child_has_no_rank():
    """init() in a child process of a worker raises: it would train alone."""
    process_id = os.fork()
    if process_id == 0:
        try:
            hvd.init()
        except JoinError as error:
            os._exit(7 if "a child of a worker" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 7
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
