"""The coordinator without processes: order, fusion, groups, cache ids, joins, mismatches."""

from collections.abc import Sequence

import pytest

from rankless.extensions.horovod.engine.coordinator import Coordinator, ScheduledBatch, round_fusion_threshold
from rankless.extensions.horovod.engine.messages import RequestMetadata


def combine(_request: RequestMetadata, values: Sequence[bytes], _size: int) -> bytes:
    return b"+".join(values)


def make_coordinator(size: int = 2, **settings: object) -> Coordinator:
    return Coordinator(size, combine=combine, **settings)  # type: ignore[arg-type]


def request(name: str, *, kind: str = "allreduce", **fields: object) -> RequestMetadata:
    plain: dict[str, object] = {"dtype": "float32", "shape": (1000,), **fields}
    return RequestMetadata(kind=kind, key=f"{kind}.{name}", **plain)  # type: ignore[arg-type]


def submit(coordinator: Coordinator, rank: int, *requests: RequestMetadata, values: bytes = b"") -> None:
    for one in requests:
        coordinator.submit(rank, one, values, 0.0)


def schedule(coordinator: Coordinator, *, is_idle: bool = True) -> list[ScheduledBatch]:
    return list(coordinator.schedule(is_idle=is_idle))


def keys(batch: ScheduledBatch) -> list[str]:
    return [one.submitted.key.partition(".")[2] for one in batch.operations]


def schedule_all(coordinator: Coordinator) -> list[list[str]]:
    found = []
    while batches := schedule(coordinator):
        found += [keys(one) for one in batches]
    return found


def test_ready_operations_are_executed_in_any_order_of_submission():
    coordinator = make_coordinator()
    submit(coordinator, 0, request("a"), request("b"))
    assert schedule(coordinator) == []
    submit(coordinator, 1, request("b"))
    assert [keys(one) for one in schedule(coordinator)] == [["b"]]
    submit(coordinator, 1, request("a"))
    assert [keys(one) for one in schedule(coordinator)] == [["a"]]


def test_operations_that_get_ready_during_an_execution_are_fused():
    coordinator = make_coordinator()
    for rank in (0, 1):
        submit(coordinator, rank, *(request(name) for name in "abc"))
    assert schedule(coordinator, is_idle=False) == []
    assert schedule_all(coordinator) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float64"},
        {"reduction": 3},
        {"prescale": 0.5},
        {"device": "cuda"},
        {"kind": "broadcast"},
    ],
)
def test_only_compatible_operations_are_fused_and_others_are_skipped(other: dict[str, object]):
    coordinator = make_coordinator()
    for rank in (0, 1):
        submit(coordinator, rank, request("a"), request("odd", **other), request("b"))
    assert schedule_all(coordinator) == [["a", "b"], ["odd"]]


def test_a_batch_is_no_larger_than_the_threshold_except_for_a_group():
    coordinator = make_coordinator(fusion_bytes=8000)
    for rank in (0, 1):
        submit(coordinator, rank, *(request(name) for name in "abc"))
        submit(coordinator, rank, *(request(name, group="g", group_size=3) for name in "xyz"))
    assert schedule_all(coordinator) == [["a", "b"], ["c"], ["x", "y", "z"]]


def test_the_threshold_is_rounded_up_to_equal_shares_of_a_hosts_ranks():
    assert [round_fusion_threshold(threshold, 2) for threshold in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]
    assert round_fusion_threshold(128 << 20, 3) == 134_218_752


def test_a_group_waits_for_all_its_members_unless_groups_may_be_split():
    grouped = [request(name, group="g", group_size=2) for name in "xy"]
    whole, split = make_coordinator(), make_coordinator(splits_groups=True)
    for coordinator in (whole, split):
        for rank in (0, 1):
            submit(coordinator, rank, grouped[0])
    assert schedule_all(whole) == []
    assert schedule_all(split) == [["x"]]
    for rank in (0, 1):
        submit(whole, rank, grouped[1])
    assert schedule_all(whole) == [["x", "y"]]


def test_operations_of_overlapping_sets_have_one_order_and_go_to_their_members():
    coordinator = make_coordinator(3)
    for number, ranks in enumerate([(0, 1), (1, 2)], start=1):
        for rank in range(3):
            submit(coordinator, rank, request(str(number), kind="add_process_set", ranks=ranks, shape=(), dtype=""))
    assert [one.operations[0].result for one in schedule(coordinator)] == [(1,), (2,)]
    for set_id, ranks in ((2, (1, 2)), (1, (0, 1))):
        for rank in ranks:
            submit(coordinator, rank, request("a", set_id=set_id))
    first, second = schedule(coordinator)
    assert (first.set_id, first.members) == (2, (1, 2))
    assert (second.set_id, second.members) == (1, (0, 1))


def test_rank_0_schedules_on_while_only_other_ranks_execute():
    coordinator = make_coordinator(3)
    for rank in range(3):
        submit(coordinator, rank, request("s", kind="add_process_set", ranks=(1, 2), shape=(), dtype=""))
    schedule(coordinator)
    for rank in (1, 2):
        submit(coordinator, rank, request("a", set_id=1), request("b", set_id=1, dtype="float64"))
    assert [keys(one) for one in schedule(coordinator)] == [["a"], ["b"]]


def test_inline_tensors_are_reduced_at_once_in_rank_order():
    coordinator = make_coordinator()
    small = request("a", shape=(2,), is_inline=True)
    submit(coordinator, 1, small, values=b"one")
    submit(coordinator, 0, small, values=b"zero")
    (batch,) = schedule(coordinator, is_idle=False)
    assert batch.values == [b"zero+one"]
    assert batch.make_message(1).items[0].is_inline


def test_a_mismatch_is_an_error_on_all_ranks_and_leaves_other_operations_alone():
    coordinator = make_coordinator()
    for rank in (0, 1):
        submit(coordinator, rank, request("good"), request("bad", shape=(3 + rank,)), request("fine"))
    first, second = schedule(coordinator)
    assert first.operations[0].error == (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], "
        "but another rank sent a tensor of shape [4]. Operation allreduce.bad: the first is rank 0, the other rank 1."
    )
    assert keys(second) == ["good", "fine"]
    assert all(not one.error for one in second.operations)


def test_a_cache_id_stands_for_what_each_rank_has_described():
    coordinator = make_coordinator()
    for rank in (0, 1):
        submit(coordinator, rank, request("a", kind="allgather", shape=(rank + 1, 2)))
    (batch,) = schedule(coordinator)
    cache_id = batch.make_message(0).items[0].cache_id
    assert cache_id >= 0
    assert coordinator.submit_cached(0, cache_id, b"", 0.0)
    assert coordinator.submit_cached(1, cache_id, b"", 0.0)
    (batch,) = schedule(coordinator)
    assert batch.make_message(1).items[0].details == (1, 2)
    assert batch.make_message(1).items[0].cache_id == -1


def test_the_least_recently_used_cache_id_is_evicted_first():
    coordinator = make_coordinator(1, capacity=2)
    cache_ids = {}
    for name in "abc":
        submit(coordinator, 0, request(name))
        cache_ids[name] = schedule(coordinator)[0].make_message(0).items[0].cache_id
    assert not coordinator.submit_cached(0, cache_ids["a"], b"", 0.0)
    assert coordinator.submit_cached(0, cache_ids["b"], b"", 0.0)
    assert not coordinator.submit_cached(0, 99, b"", 0.0)


@pytest.mark.parametrize("name", ["noname.7", "a"])
def test_unnamed_operations_and_those_without_a_cache_get_no_cache_id(name: str):
    coordinator = make_coordinator(1, capacity=1024 if "noname" in name else 0)
    submit(coordinator, 0, request(name))
    assert schedule(coordinator)[0].make_message(0).items[0].cache_id == -1


def test_a_joined_rank_takes_part_with_zeros_until_all_have_joined():
    coordinator = make_coordinator(3)
    join = RequestMetadata(kind="join", key="join")
    submit(coordinator, 0, request("a"))
    submit(coordinator, 1, request("a"))
    submit(coordinator, 2, join)
    (batch,) = schedule(coordinator)
    assert batch.make_message(2).items[0].request == request("a")
    assert batch.make_message(0).items[0].request is None
    submit(coordinator, 0, join)
    assert schedule(coordinator) == []
    submit(coordinator, 1, join)
    (batch,) = schedule(coordinator)
    assert batch.make_message(0).items[0].details == (1,)
    submit(coordinator, 0, request("b"))
    assert schedule(coordinator) == []


def test_only_allreduce_continues_after_a_join():
    coordinator = make_coordinator()
    submit(coordinator, 1, RequestMetadata(kind="join", key="join"))
    submit(coordinator, 0, request("a", kind="allgather"))
    (batch,) = schedule(coordinator)
    assert batch.operations[0].error.startswith("Allgather is not supported with Join at this time.")


def test_a_barrier_waits_for_every_member():
    coordinator = make_coordinator()
    barrier = RequestMetadata(kind="barrier", key="barrier")
    submit(coordinator, 0, barrier)
    assert schedule(coordinator) == []
    submit(coordinator, 1, barrier)
    assert [one.submitted.key for one in schedule(coordinator)[0].operations] == ["barrier"]


def test_the_ranks_that_others_wait_for_are_known():
    coordinator = make_coordinator(3)
    submit(coordinator, 0, request("a"), request("b"))
    submit(coordinator, 1, request("b"))
    assert coordinator.find_missing_ranks(before=1.0) == {1: ["allreduce.a"], 2: ["allreduce.a", "allreduce.b"]}
    assert coordinator.find_missing_ranks(before=0.0) == {}


MISMATCHES = {
    "Mismatched data types: One rank had type float32, but another rank had type float64.": (
        {},
        {"dtype": "float64"},
    ),
    "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 0.": (
        {"reduction": 1},
        {"reduction": 0},
    ),
    "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), "
    "but another rank sent factors (2, 1).": (
        {},
        {"prescale": 2.0},
    ),
    "Mismatched BROADCAST root ranks: One rank specified root rank 1, but another rank specified root rank 0.": (
        {"kind": "broadcast", "root": 1},
        {"kind": "broadcast", "root": 0},
    ),
    "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, but another rank sent a tensor of rank 1.": (
        {"kind": "allgather", "shape": (2, 3)},
        {"kind": "allgather", "shape": (2,)},
    ),
    "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, "
    "but another rank sent a tensor with dimension 1 equal to 4.": (
        {"kind": "allgather", "shape": (2, 3)},
        {"kind": "allgather", "shape": (2, 4)},
    ),
    "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, "
    "but another rank specified device GPU.": ({}, {"device": "cuda"}),
}


@pytest.mark.parametrize("text", MISMATCHES)
def test_mismatches_have_horovods_texts(text: str):
    coordinator = make_coordinator()
    for rank, fields in enumerate(MISMATCHES[text]):
        submit(coordinator, rank, request("a", **fields))  # type: ignore[arg-type]
    error = schedule(coordinator)[0].operations[0].error
    assert error.startswith(text)
    assert error.endswith(".a: the first is rank 0, the other rank 1.")


def failed(coordinator: Coordinator) -> list[tuple[str, tuple[int, ...], str]]:
    """The key, recipients and error of each operation scheduled."""
    return [
        (one.submitted.key, batch.recipients, one.error) for batch in schedule(coordinator) for one in batch.operations
    ]


def test_ranks_that_wait_for_each_other_get_an_error_that_names_them():
    coordinator = make_coordinator(3)
    submit(coordinator, 0, request("x"))
    for rank in (1, 2):
        submit(coordinator, rank, request("x", kind="broadcast"))
    coordinator.wait(0, [(0, "allreduce.x")], 1.0)
    coordinator.wait(2, [(0, "broadcast.x")], 1.0)
    coordinator.break_deadlock(before=1.0)
    assert failed(coordinator) == []
    coordinator.break_deadlock(before=1.5)
    found = failed(coordinator)
    assert {(key, recipients) for key, recipients, _ in found} == {("allreduce.x", (0,)), ("broadcast.x", (1, 2))}
    assert all("rank 0 waits in allreduce.x, which ranks 1, 2 have not submitted" in text for _, _, text in found)
    assert all("rank 2 waits in broadcast.x, which rank 0 has not submitted" in text for _, _, text in found)


@pytest.mark.parametrize("cause", ["it computes", "it has submitted since", "it waits for something else", "it joined"])
def test_ranks_that_wait_for_one_that_goes_on_get_no_error(cause: str):
    coordinator = make_coordinator(2)
    submit(coordinator, 0, request("x"))
    submit(coordinator, 1, request("y"))
    coordinator.wait(0, [(0, "allreduce.x")], 0.0)
    if cause != "it computes":
        coordinator.wait(1, [(0, "allreduce.y")], 0.0)
    if cause == "it has submitted since":
        submit(coordinator, 1, request("z"))
    if cause == "it waits for something else":
        coordinator.wait(1, [(0, "allreduce.gone")], 0.0)
    if cause == "it joined":
        submit(coordinator, 1, RequestMetadata(kind="join", key="join"))
        schedule(coordinator)
    coordinator.break_deadlock(before=1.0)
    assert failed(coordinator) == []


def test_an_interrupted_wait_and_a_new_one_start_anew():
    coordinator = make_coordinator(2)
    submit(coordinator, 0, request("x"))
    submit(coordinator, 1, request("y"), request("z"))
    coordinator.wait(0, [(0, "allreduce.x")], 0.0)
    coordinator.wait(1, [(0, "allreduce.y")], 0.0)
    coordinator.wait(1, [], 0.5)
    coordinator.break_deadlock(before=1.0)
    assert failed(coordinator) == []
    coordinator.wait(1, [(0, "allreduce.z")], 1.0)
    coordinator.break_deadlock(before=1.0)
    assert failed(coordinator) == []
    coordinator.break_deadlock(before=1.1)
    assert [key for key, _, _ in failed(coordinator)] == ["allreduce.x", "allreduce.z"]


def test_a_group_in_which_ranks_wait_for_each_other_fails_as_a_whole():
    coordinator = make_coordinator(2)
    for rank in (0, 1):
        submit(coordinator, rank, request("both", group="g", group_size=2))
        submit(coordinator, rank, request(f"only {rank}", group="g", group_size=2))
    for rank in (0, 1):
        coordinator.wait(rank, [(0, "allreduce.both"), (0, f"allreduce.only {rank}")], 0.0)
    coordinator.break_deadlock(before=1.0)
    assert {key for key, _, _ in failed(coordinator)} == {"allreduce.both", "allreduce.only 0", "allreduce.only 1"}


def test_a_refused_call_fails_on_the_ranks_that_make_it():
    coordinator = make_coordinator(3)
    submit(coordinator, 0, request("x"))
    coordinator.refuse(1, (0, "allreduce.x"), "it is strided", 0.0)
    assert failed(coordinator) == []
    submit(coordinator, 2, request("x"))
    assert failed(coordinator) == [("allreduce.x", (0, 2), "allreduce.x was refused by rank 1: it is strided")]
    for rank in range(3):
        submit(coordinator, rank, request("x"))
    assert [error for _, _, error in failed(coordinator)] == [""]


def test_a_name_refused_while_in_use_counts_for_the_next_operation_of_that_name():
    coordinator = make_coordinator(2)
    submit(coordinator, 0, request("x"))
    coordinator.refuse(0, (0, "allreduce.x"), "in use", 0.0)
    submit(coordinator, 1, request("x"))
    assert [error for _, _, error in failed(coordinator)] == [""]
    submit(coordinator, 1, request("x"))
    assert failed(coordinator) == [("allreduce.x", (1,), "allreduce.x was refused by rank 0: in use")]


def test_a_call_that_all_refuse_leaves_nothing_and_a_barrier_forgets_one_of_some():
    coordinator = make_coordinator(2)
    for rank in (0, 1):
        coordinator.refuse(rank, (0, "allreduce.x"), "in use", 0.0)
    coordinator.refuse(1, (0, "allreduce.y"), "in use", 0.0)
    assert coordinator.find_missing_ranks(before=1.0) == {}
    for rank in (0, 1):
        submit(coordinator, rank, RequestMetadata(kind="barrier", key="barrier"))
    for rank in (0, 1):
        submit(coordinator, rank, request("x"), request("y"))
    assert [error for _, _, error in failed(coordinator)] == ["", "", ""]
