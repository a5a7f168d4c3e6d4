"""What the coordinator decides, without processes: order, fusion, groups, numbers, joins, disagreements."""

from collections.abc import Sequence

import pytest

from rankless.compat.horovod.engine.coordinator import Coordinator, Decision, fusion_limit
from rankless.compat.horovod.engine.messages import Request


def combine(_request: Request, values: Sequence[bytes], _size: int) -> bytes:
    return b"+".join(values)


def coordinator(size: int = 2, **settings: object) -> Coordinator:
    return Coordinator(size, combine=combine, **settings)  # type: ignore[arg-type]


def request(name: str, *, kind: str = "allreduce", **fields: object) -> Request:
    plain: dict[str, object] = {"dtype": "float32", "shape": (1000,), **fields}
    return Request(kind=kind, key=f"{kind}.{name}", **plain)  # type: ignore[arg-type]


def submit(made: Coordinator, rank: int, *requests: Request, values: bytes = b"") -> None:
    for one in requests:
        made.submit(rank, one, values, 0.0)


def decided(made: Coordinator, *, is_idle: bool = True) -> list[Decision]:
    return list(made.decide(is_idle=is_idle))


def keys(decision: Decision) -> list[str]:
    return [one.waiting.key.partition(".")[2] for one in decision.chosen]


def all_decided(made: Coordinator) -> list[list[str]]:
    found = []
    while batch := decided(made):
        found += [keys(decision) for decision in batch]
    return found


def test_what_all_have_ready_is_executed_whatever_their_orders():
    made = coordinator()
    submit(made, 0, request("a"), request("b"))
    assert decided(made) == []
    submit(made, 1, request("b"))
    assert [keys(one) for one in decided(made)] == [["b"]]
    submit(made, 1, request("a"))
    assert [keys(one) for one in decided(made)] == [["a"]]


def test_what_gets_ready_while_something_is_executed_is_executed_as_one():
    made = coordinator()
    for rank in (0, 1):
        submit(made, rank, *(request(name) for name in "abc"))
    assert decided(made, is_idle=False) == []
    assert all_decided(made) == [["a", "b", "c"]]


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
def test_only_what_is_alike_is_fused_and_the_rest_is_looked_past(other: dict[str, object]):
    made = coordinator()
    for rank in (0, 1):
        submit(made, rank, request("a"), request("odd", **other), request("b"))
    assert all_decided(made) == [["a", "b"], ["odd"]]


def test_a_batch_is_no_larger_than_the_threshold_but_for_a_group():
    made = coordinator(fusion_bytes=8000)
    for rank in (0, 1):
        submit(made, rank, *(request(name) for name in "abc"))
        submit(made, rank, *(request(name, group="g", group_size=3) for name in "xyz"))
    assert all_decided(made) == [["a", "b"], ["c"], ["x", "y", "z"]]


def test_the_threshold_is_rounded_up_to_what_a_hosts_ranks_share_evenly():
    assert [fusion_limit(threshold, 2) for threshold in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]
    assert fusion_limit(128 << 20, 3) == 134_218_752


def test_a_group_waits_for_all_its_members_unless_groups_may_be_split():
    grouped = [request(name, group="g", group_size=2) for name in "xy"]
    whole, split = coordinator(), coordinator(splits=True)
    for made in (whole, split):
        for rank in (0, 1):
            submit(made, rank, grouped[0])
    assert all_decided(whole) == []
    assert all_decided(split) == [["x"]]
    for rank in (0, 1):
        submit(whole, rank, grouped[1])
    assert all_decided(whole) == [["x", "y"]]


def test_operations_of_sets_that_overlap_have_one_order_and_go_to_their_members():
    made = coordinator(3)
    for number, ranks in enumerate([(0, 1), (1, 2)], start=1):
        for rank in range(3):
            submit(made, rank, request(str(number), kind="add_process_set", ranks=ranks, shape=(), dtype=""))
    assert [one.chosen[0].answer for one in decided(made)] == [(1,), (2,)]
    for set_id, ranks in ((2, (1, 2)), (1, (0, 1))):
        for rank in ranks:
            submit(made, rank, request("a", set_id=set_id))
    first, second = decided(made)
    assert (first.set_id, first.members) == (2, (1, 2))
    assert (second.set_id, second.members) == (1, (0, 1))


def test_rank_0_is_not_kept_from_deciding_by_what_it_does_not_execute():
    made = coordinator(3)
    for rank in range(3):
        submit(made, rank, request("s", kind="add_process_set", ranks=(1, 2), shape=(), dtype=""))
    decided(made)
    for rank in (1, 2):
        submit(made, rank, request("a", set_id=1), request("b", set_id=1, dtype="float64"))
    assert [keys(one) for one in decided(made)] == [["a"], ["b"]]


def test_small_tensors_are_answered_at_once_in_the_order_of_ranks():
    made = coordinator()
    small = request("a", shape=(2,), rides=True)
    submit(made, 1, small, values=b"one")
    submit(made, 0, small, values=b"zero")
    (decision,) = decided(made, is_idle=False)
    assert decision.values == [b"zero+one"]
    assert decision.message(1).items[0].rides


def test_what_does_not_fit_together_is_an_error_for_all_and_spoils_no_batch():
    made = coordinator()
    for rank in (0, 1):
        submit(made, rank, request("good"), request("bad", shape=(3 + rank,)), request("fine"))
    first, second = decided(made)
    assert first.chosen[0].error == (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], "
        "but another rank sent a tensor of shape [4]."
    )
    assert keys(second) == ["good", "fine"]
    assert all(not one.error for one in second.chosen)


def test_a_number_stands_for_what_each_rank_has_described():
    made = coordinator()
    for rank in (0, 1):
        submit(made, rank, request("a", kind="allgather", shape=(rank + 1, 2)))
    (decision,) = decided(made)
    number = decision.message(0).items[0].number
    assert number >= 0
    assert made.submit_again(0, number, b"", 0.0)
    assert made.submit_again(1, number, b"", 0.0)
    (decision,) = decided(made)
    assert decision.message(1).items[0].details == (1, 2)
    assert decision.message(1).items[0].number == -1


def test_numbers_are_forgotten_the_least_used_first():
    made = coordinator(1, capacity=2)
    numbers = {}
    for name in "abc":
        submit(made, 0, request(name))
        numbers[name] = decided(made)[0].message(0).items[0].number
    assert not made.submit_again(0, numbers["a"], b"", 0.0)
    assert made.submit_again(0, numbers["b"], b"", 0.0)
    assert not made.submit_again(0, 99, b"", 0.0)


@pytest.mark.parametrize("name", ["noname.7", "a"])
def test_unnamed_operations_and_those_without_a_cache_get_no_number(name: str):
    made = coordinator(1, capacity=1024 if "noname" in name else 0)
    submit(made, 0, request(name))
    assert decided(made)[0].message(0).items[0].number == -1


def test_who_has_joined_takes_part_with_zeros_until_all_have():
    made = coordinator(3)
    join = Request(kind="join", key="join")
    submit(made, 0, request("a"))
    submit(made, 1, request("a"))
    submit(made, 2, join)
    (decision,) = decided(made)
    assert decision.message(2).items[0].request == request("a")
    assert decision.message(0).items[0].request is None
    submit(made, 0, join)
    assert decided(made) == []
    submit(made, 1, join)
    (decision,) = decided(made)
    assert decision.message(0).items[0].details == (1,)
    submit(made, 0, request("b"))
    assert decided(made) == []


def test_only_allreduce_goes_on_after_a_join():
    made = coordinator()
    submit(made, 1, Request(kind="join", key="join"))
    submit(made, 0, request("a", kind="allgather"))
    (decision,) = decided(made)
    assert decision.chosen[0].error.startswith("Allgather is not supported with Join at this time.")


def test_a_barrier_is_met_by_every_member():
    made = coordinator()
    barrier = Request(kind="barrier", key="barrier")
    submit(made, 0, barrier)
    assert decided(made) == []
    submit(made, 1, barrier)
    assert [one.waiting.key for one in decided(made)[0].chosen] == ["barrier"]


def test_who_keeps_others_waiting_is_known():
    made = coordinator(3)
    submit(made, 0, request("a"), request("b"))
    submit(made, 1, request("b"))
    assert made.stalled(before=1.0) == {1: ["allreduce.a"], 2: ["allreduce.a", "allreduce.b"]}
    assert made.stalled(before=0.0) == {}


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
def test_disagreements_have_horovods_words(text: str):
    made = coordinator()
    for rank, fields in enumerate(MISMATCHES[text]):
        submit(made, rank, request("a", **fields))  # type: ignore[arg-type]
    assert decided(made)[0].chosen[0].error == text
