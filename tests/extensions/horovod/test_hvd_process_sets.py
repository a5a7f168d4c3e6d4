"""Process sets: given at init, added and removed, and the errors on other ranks."""

import pytest
import torch
from support.horovod_ranks import error_of
from support.processes import on_mesh


def static(_):
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # in a worker process

    even, odd = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 3])
    assert (even.process_set_id, even.size(), even.rank()) == (None, None, None)
    hvd.init(process_sets=[even, odd])
    try:
        mine, others = (even, odd) if hvd.rank() % 2 == 0 else (odd, even)
        own = torch.tensor([hvd.rank() + 1.0])
        facts = [mine.ranks, mine.size(), mine.rank(), mine.included(), others.included(), mine.process_set_id]
        results = [
            hvd.allreduce(own, op=hvd.Sum, process_set=mine).item(),
            hvd.allreduce(own, process_set=mine).item(),
            hvd.allgather(own, process_set=mine).tolist(),
            hvd.broadcast(own, mine.ranks[1], process_set=mine).item(),
            hvd.alltoall(torch.tensor([hvd.rank(), hvd.rank() + 10]), process_set=mine).tolist(),
            hvd.reducescatter(torch.ones(3), op=hvd.Sum, process_set=mine).tolist(),
            hvd.allgather_object(hvd.rank(), process_set=mine),
            hvd.broadcast_object("x" * hvd.rank(), root_rank=mine.ranks[1], process_set=mine),
        ]
        hvd.barrier(process_set=mine)
        refused = [
            error_of(lambda: hvd.allreduce(own, process_set=others)),
            error_of(lambda: hvd.broadcast(own, mine.ranks[0] + 1, process_set=mine)),
            error_of(others.rank),
            error_of(lambda: hvd.allreduce(own, op=hvd.Adasum, process_set=mine)),
            error_of(lambda: hvd.add_process_set([0, 1])),
            error_of(lambda: hvd.remove_process_set(mine)),
        ]
        assert hvd.global_process_set.ranks == [0, 1, 2, 3]
        assert hvd.global_process_set.size() == 4
        assert hvd.allreduce(own, op=hvd.Sum).item() == 10.0
        return facts, results, refused
    finally:
        hvd.shutdown()


@pytest.mark.slow
def test_sets_given_at_init_work_side_by_side_and_reject_other_ranks():
    dynamic = "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {} process sets after Horovod initialization."
    for rank, (facts, results, refused) in enumerate(on_mesh(4, static)):
        ranks = [0, 2] if rank % 2 == 0 else [1, 3]
        place = rank // 2
        total = sum(ranks) + 2.0
        assert facts == [ranks, 2, place, True, False, rank % 2 + 1]
        assert results == [
            total,
            total / 2,
            [ranks[0] + 1.0, ranks[1] + 1.0],
            ranks[1] + 1.0,
            [other + 10 * place for other in ranks],
            [[2.0, 2.0], [2.0]][place],
            ranks,
            "x" * ranks[1],
        ]
        assert refused == [
            ("ValueError", f"Allreduce: Rank {rank} is not a member of the provided process set."),
            ("ValueError", f"broadcast received invalid root rank {ranks[0] + 1} for provided process set"),
            ("ValueError", "Process is not part of provided process set."),
            ("NotImplementedError", "Adasum does not support non-global process sets yet."),
            ("ValueError", dynamic.format("adding")),
            ("ValueError", dynamic.format("removing")),
        ]


def dynamic(_):
    import os  # noqa: PLC0415  # in a worker process

    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # as above

    hvd.init(process_sets="dynamic")
    try:
        own = torch.tensor([hvd.rank() + 1.0])
        first = hvd.add_process_set([0, 1])
        reference = hvd.ProcessSet([1, 0])
        second = hvd.add_process_set(hvd.ProcessSet([1, 2]))
        facts = [first.process_set_id, reference.process_set_id, second.process_set_id, str(second)]
        texts = [
            error_of(lambda: hvd.add_process_set([0, 1])),
            error_of(lambda: hvd.add_process_set([0, 3])),
            error_of(lambda: hvd.add_process_set([])),
        ]
        sums = [
            hvd.allreduce(own, op=hvd.Sum, name="x", process_set=each).item() if each.included() else None
            for each in (first, second)
        ]
        removed = [hvd.remove_process_set(each) for each in (first, first, hvd.global_process_set)]
        gone = error_of(lambda: hvd.allreduce(own, process_set=reference))
        again = hvd.add_process_set(first)
        return facts, texts, sums, removed, reference.process_set_id == again.process_set_id, gone
    finally:
        hvd.shutdown()
        os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")


def test_sets_are_added_and_removed_while_the_job_runs():
    for rank, (facts, texts, sums, removed, is_again, gone) in enumerate(on_mesh(3, dynamic)):
        assert facts == [1, 1, 2, "ProcessSet(process_set_id=2, ranks=[1, 2], mpi_comm=None)"]
        assert texts == [
            (
                "ValueError",
                "Attempted to add a duplicate process set: ProcessSet(process_set_id=1, ranks=[0, 1], mpi_comm=None)",
            ),
            ("ValueError", "A process set needs ranks from 0 to 2; found [0, 3]."),
            ("ValueError", "A process set needs ranks from 0 to 2; found []."),
        ]
        assert sums == [3.0 if rank < 2 else None, 5.0 if rank > 0 else None]
        assert removed == [True, False, False]
        assert is_again
        assert gone[0] == "ValueError"
        assert "is not registered" in gone[1]


def duplicates(_):
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # in a worker process

    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
    return [
        error_of(lambda: hvd.init(process_sets=sets)),
        error_of(lambda: hvd.init(process_sets="static")),
        error_of(lambda: hvd.ProcessSet(["a"])),
        error_of(lambda: hvd.ProcessSet(object()))[0],
        error_of(lambda: hvd.init(comm=object()))[0],
        hvd.is_initialized(),
    ]


def test_invalid_sets_are_rejected_before_joining():
    text = (
        "Horovod could not be initialized because process_sets entry number 1 is a duplicate: "
        "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"
    )
    ranks = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
    choice = """process_sets is a list of hvd.ProcessSet, or "dynamic"; found 'static'."""
    expected = [("ValueError", text), ("ValueError", choice), ("ValueError", ranks), "ValueError", "ValueError", False]
    assert on_mesh(2, duplicates) == [expected] * 2
