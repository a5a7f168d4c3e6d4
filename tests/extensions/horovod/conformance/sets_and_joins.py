"""Process sets, join and barrier."""

import os

import horovod.torch as hvd
import torch
from raised import raised


def anew(**arguments: object) -> None:
    hvd.barrier()
    hvd.shutdown()
    hvd.init(**arguments)


def refused_by(outside: hvd.ProcessSet) -> None:
    """The errors on a rank that is not part of the set."""
    ones = torch.ones(2)
    for op, call in {
        "Allreduce": lambda: hvd.grouped_allreduce([ones], process_set=outside),
        "Allgather": lambda: hvd.allgather(ones, process_set=outside),
        "Broadcast": lambda: hvd.broadcast(ones, outside.ranks[0], process_set=outside),
        "Alltoall": lambda: hvd.alltoall(ones, process_set=outside),
        "Reducescatter": lambda: hvd.reducescatter(ones, process_set=outside),
        "Barrier": lambda: hvd.barrier(process_set=outside),
    }.items():
        text = raised((ValueError, hvd.HorovodInternalError), call)
        assert text == f"{op}: Rank {hvd.rank()} is not a member of the provided process set."


def check_static_sets():
    """init(process_sets=[…]) makes sets of ranks; operations are among their members, and a root is a rank of all."""
    size, rank = hvd.size(), hvd.rank()
    last = hvd.ProcessSet([0, size - 1])
    one = hvd.ProcessSet([1])
    anew(process_sets=[last, one])
    assert last.process_set_id is not None
    assert last.ranks == [0, size - 1]
    assert (last.size(), last.included()) == (2, rank in (0, size - 1))
    if last.included():
        assert last.rank() == [0, size - 1].index(rank)
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=last).item() == size - 1
        assert hvd.allreduce(torch.full((50_000,), rank), op=hvd.Sum, process_set=last)[-1].item() == size - 1
        assert hvd.allgather(torch.tensor([rank]), process_set=last).tolist() == [0, size - 1]
        assert hvd.broadcast(torch.tensor([rank]), size - 1, process_set=last).item() == size - 1
        assert hvd.alltoall(torch.tensor([rank, rank]), process_set=last).tolist() == [0, size - 1]
        hvd.barrier(process_set=last)
        assert hvd.broadcast_object({"from": rank}, 0, process_set=last) == {"from": 0}
    outside = next((each for each in (last, one) if not each.included()), None)
    if outside is not None:
        refused_by(outside)
    if one.included():
        assert hvd.allreduce(torch.tensor([5.0]), process_set=one).item() == 5.0
        assert hvd.broadcast(torch.tensor([5.0]), 1, process_set=one).item() == 5.0
        text = raised(ValueError, lambda: hvd.broadcast(torch.tensor([5.0]), 0, process_set=one))
        assert text == "broadcast received invalid root rank 0 for provided process set"
    # Unnamed operations are counted for each set: those of one do not disturb another's.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    anew()


def check_the_set_of_all():
    """global_process_set has every rank, and the number 0."""
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks) == (0, list(range(hvd.size())))
    assert (everyone.size(), everyone.rank(), everyone.included()) == (hvd.size(), hvd.rank(), True)


def check_dynamic_sets_only_by_leave():
    """add_process_set needs HOROVOD_DYNAMIC_PROCESS_SETS."""
    text = raised(ValueError, lambda: hvd.add_process_set([0]))
    assert text == "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets after Horovod initialization."


def check_dynamic_sets():
    """With it sets are added and removed at any time; a duplicate is refused; a removed one is known no more."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    anew()
    ranks = [0, 1] if hvd.size() > 2 else [1]
    for _ in range(2):
        pair = hvd.add_process_set(ranks)
        assert pair.process_set_id > 0
        text = raised(ValueError, lambda: hvd.add_process_set(hvd.ProcessSet(ranks)))
        assert text.startswith("Attempted to add a duplicate process set: ")
        if pair.included():
            assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=pair).item() == sum(ranks)
        hvd.barrier()
        assert hvd.remove_process_set(pair) is True
        assert hvd.remove_process_set(pair) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    anew()


def check_sets_that_overlap_do_not_wait_for_each_other():
    """Operations of a ring of overlapping sets, submitted in orders that differ, all end."""
    size, rank = hvd.size(), hvd.rank()
    pairs = {tuple(sorted((first, (first + 1) % size))) for first in range(size)}
    sets = [hvd.ProcessSet(list(pair)) for pair in sorted(pairs)]
    anew(process_sets=sets)
    own = [each for each in sets if each.included()]
    handles = []
    for number in range(20):
        for each in own if (rank + number) % 2 else own[::-1]:
            name = f"{each.process_set_id}.{number}"
            given = torch.full((20_000,), float(number))
            handles.append((number, hvd.allreduce_async(given, op=hvd.Sum, name=name, process_set=each)))
    for number, handle in handles:
        assert hvd.synchronize(handle)[0].item() == 2.0 * number
    anew()


def check_joining():
    """A rank that has joined counts as zeros in allreduce, and in the divisor; all get the last rank that joined."""
    size, rank = hvd.size(), hvd.rank()
    for count in (5, 50_000):
        if rank:
            for step in range(rank):
                found = hvd.allreduce(torch.ones(count, dtype=torch.float64), name=f"uneven.{count}.{step}")
                torch.testing.assert_close(
                    found, torch.full((count,), (size - 1 - step) / size, dtype=torch.float64), rtol=1e-14, atol=0
                )
        last = hvd.join()
        assert last == size - 1  # whose last step came when all others had joined
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_reductions_and_groups_with_who_has_joined():
    """Zeros of who has joined count in every reduction, and in groups."""
    size, rank = hvd.size(), hvd.rank()
    for count in (3, 50_000):
        if rank:
            for op, expected in ((hvd.Sum, 2.0 * (size - 1)), (hvd.Min, 0.0), (hvd.Max, 2.0), (hvd.Product, 0.0)):
                found = hvd.allreduce(torch.full((count,), 2.0), op=op, name=f"with.zeros.{count}.{op}")
                assert found.unique().tolist() == [expected], op
            pair = [torch.full((count,), 2.0), torch.full((7,), -2.0)]
            for one, value in zip(hvd.grouped_allreduce(pair, name=f"pair.{count}"), (2.0, -2.0), strict=True):
                torch.testing.assert_close(one, torch.full_like(one, value * (size - 1) / size))
        hvd.join()


def check_what_joining_forbids():
    """Allgather and the others raise on the ranks that call them while one has joined, and name it."""
    if hvd.rank():
        ones = torch.ones(hvd.size())
        for key, call in {
            "allgather": lambda: hvd.allgather(ones, name="late"),
            "broadcast": lambda: hvd.broadcast(ones, 1, name="late"),
            "alltoall": lambda: hvd.alltoall(ones, name="late"),
            "reducescatter": lambda: hvd.reducescatter(ones, name="late"),
        }.items():
            text = raised(hvd.HorovodInternalError, call)
            hint = " Specify sparse_to_dense=True if using DistributedOptimizer." if key == "allgather" else ""
            assert text == (
                f"{key.title()} is not supported with Join at this time.{hint} Operation {key}.late: joined is rank 0."
            )
    hvd.join()


def check_unnamed_operations_after_joining():
    """Ranks that have called different numbers of unnamed operations before a join agree again after it."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(2):
        for _ in range(rank + 1):
            hvd.allreduce(torch.ones(3))
        hvd.join()
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
        assert hvd.broadcast(torch.tensor([rank]), size - 1).item() == size - 1


def check_sets_of_other_ranks():
    """Ranks that add sets of different ranks, or remove different sets, get an error."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    anew()
    is_last = hvd.rank() == hvd.size() - 1
    text = raised(hvd.HorovodInternalError, lambda: hvd.add_process_set([0] if is_last else [1]))
    assert text.startswith(
        "Mismatched process sets: One rank added a process set of ranks [1], "
        "but another rank added one of ranks [0]. Operation add_process_set: the first is rank"
    ), text
    kind = ValueError if is_last else hvd.HorovodInternalError
    text = raised(kind, lambda: hvd.add_process_set([0, hvd.size()] if is_last else [0]))
    assert is_last or text.startswith(f"add_process_set was refused by rank {hvd.size() - 1}: A process set needs")
    one, other = hvd.add_process_set([0]), hvd.add_process_set([1])
    text = raised(hvd.HorovodInternalError, lambda: hvd.remove_process_set(one if is_last else other))
    assert text.startswith("Mismatched process sets: One rank removed process set "), text
    assert hvd.remove_process_set(one)
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    anew()
