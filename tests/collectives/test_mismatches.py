"""Calls that do not match raise on every rank, soon, and name ranks and calls; nothing hangs."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.processes import on_mesh
from torch.distributed import ReduceOp

import rankless.collectives as collectives
from rankless.errors import CollectiveError, ConfigError, RanklessError
from rankless.parallel.mesh import Mesh

SECONDS = 2.0


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def is_last_rank(mesh: Mesh) -> bool:
    """Return whether this is the rank that makes the different call."""
    return mesh.rank == mesh.size - 1


# The calls, of which the last rank's is different, and what the error must name.
MISMATCHES: dict[str, tuple[Callable[[Mesh], Any], list[str]]] = {
    "operation": (
        lambda mesh: collectives.broadcast(ones(3), 0) if is_last_rank(mesh) else collectives.all_reduce(ones(3)),
        ["all_reduce(sum, float32 [3])", "broadcast(float32 [3], from rank 0)"],
    ),
    "shape": (
        lambda mesh: collectives.all_reduce(ones(4 if is_last_rank(mesh) else 3)),
        ["float32 [3]", "float32 [4]"],
    ),
    "shape of as many elements": (
        lambda mesh: collectives.all_reduce(ones(2, 3) if is_last_rank(mesh) else ones(3, 2)),
        ["float32 [2, 3]", "float32 [3, 2]"],
    ),
    "dtype": (
        lambda mesh: collectives.all_reduce(ones(3, dtype=torch.float64 if is_last_rank(mesh) else torch.float32)),
        ["float32 [3]", "float64 [3]"],
    ),
    "root": (
        lambda mesh: collectives.broadcast(ones(3), mesh.size - 1 if is_last_rank(mesh) else 0),
        ["from rank 0", "from rank "],
    ),
    "root of a reduction": (
        lambda mesh: collectives.reduce(ones(3), 1 if is_last_rank(mesh) else 0),
        ["to rank 0", "to rank 1"],
    ),
    "reduction": (
        lambda mesh: collectives.all_reduce(ones(3), ReduceOp.MAX if is_last_rank(mesh) else ReduceOp.SUM),
        ["all_reduce(sum", "all_reduce(max"],
    ),
    "order": (
        lambda mesh: [
            collectives.barrier() if kind else collectives.all_reduce(ones(2))
            for kind in ((True, False) if is_last_rank(mesh) else (False, True))
        ],
        ["barrier", "all_reduce(sum, float32 [2])"],
    ),
    "asynchronous shape": (
        lambda mesh: collectives.all_reduce(ones(4 if is_last_rank(mesh) else 3), async_op=True).wait(),
        ["float32 [3]", "float32 [4]"],
    ),
    "asynchronous and at once": (
        lambda mesh: (
            collectives.all_reduce(ones(4))
            if is_last_rank(mesh)
            else collectives.all_reduce(ones(3), async_op=True).wait()
        ),
        ["float32 [3]", "float32 [4]"],
    ),
    "one of several asynchronous calls": (
        lambda mesh: [
            work.wait()
            for work in [
                collectives.all_reduce(ones(3 + (is_last_rank(mesh) and number == 2)), async_op=True)
                for number in range(5)
            ]
        ],
        ["float32 [3]", "float32 [4]"],
    ),
    "what is scattered": (
        lambda mesh: collectives.scatter(
            ones(3 if is_last_rank(mesh) else 2), [ones(2)] * mesh.size if mesh.rank == 0 else None
        ),
        ["to receive from rank 0 in scatter", "[2]", "[3]"],
    ),
    "what is gathered": (
        lambda mesh: collectives.gather(
            ones(3 if is_last_rank(mesh) else 2), [ones(2)] * mesh.size if mesh.rank == 0 else None
        ),
        ["rank 0 to receive from rank", "[2]", "[3]"],
    ),
    "lists of all_gather": (
        lambda mesh: collectives.all_gather(
            [ones(3 if is_last_rank(mesh) else 2)] * mesh.size, ones(3 if is_last_rank(mesh) else 2)
        ),
        ["all_gather(float32 [2])", "all_gather(float32 [3])"],
    ),
    "lists of tensors": (
        lambda mesh: collectives.all_gather_coalesced(
            [[ones(2), ones(4 if is_last_rank(mesh) else 3)]] * mesh.size,
            [ones(2), ones(4 if is_last_rank(mesh) else 3)],
        ),
        ["float32, shapes [[2], [3]]", "float32, shapes [[2], [4]]"],
    ),
    "what is reduced as one": (
        lambda mesh: collectives.all_reduce_coalesced([ones(2)] * (2 if is_last_rank(mesh) else 1)),
        ["sum, float32, shapes [[2]])", "sum, float32, shapes [[2], [2]])"],
    ),
    "splits": (
        lambda mesh: collectives.all_to_all_single(
            ones(mesh.size), ones(mesh.size), None, [2, *[1] * (mesh.size - 2), 0] if is_last_rank(mesh) else None
        ),
        ["all_to_all_single", "[1]"],
    ),
    "objects": (
        lambda mesh: (
            collectives.broadcast_object_list([1])
            if is_last_rank(mesh)
            else collectives.all_gather_object([None] * mesh.size, 1)
        ),
        ["all_gather_object", "broadcast_object_list"],
    ),
    "pickled and typed objects": (
        lambda mesh: collectives.all_gather_object([None] * mesh.size, 1, allow_pickle=is_last_rank(mesh)),
        ["all_gather_object(allow_pickle=True)", "all_gather_object at"],
    ),
    "what cannot be sent": (
        lambda mesh: collectives.all_reduce(ones(3, 3).t() if is_last_rank(mesh) else ones(3, 3)),
        ["float32 [3, 3] with strides"],
    ),
    "an average of whole numbers": (
        lambda mesh: collectives.all_reduce(
            ones(2, dtype=torch.int64), ReduceOp.AVG if is_last_rank(mesh) else ReduceOp.SUM
        ),
        ["int64"],
    ),
    "an object without a typed form": (
        lambda mesh: collectives.all_gather_object([None] * mesh.size, object() if is_last_rank(mesh) else 1),
        ["object"],
    ),
}


def outcome(mesh: Mesh, name: str) -> tuple[str, str, float]:
    """Return how a mismatched call ends on this rank, and check that the ranks can still run a collective."""
    action, _ = MISMATCHES[name]
    start = time.monotonic()
    try:
        action(mesh)
        kind, text = "nothing", ""
    except RanklessError as error:
        kind, text = type(error).__name__, str(error)
    took = time.monotonic() - start
    if name == "order":
        return kind, text, took
    total = torch.tensor([float(mesh.rank)])
    collectives.all_reduce(total)
    assert total.item() == sum(range(mesh.size))
    return kind, text, took


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MISMATCHES)
def test_every_rank_raises_and_names_ranks_and_calls(name: str, size: int):
    answers = on_mesh(size, outcome, name)
    words = MISMATCHES[name][1]
    for rank, (kind, text, seconds) in enumerate(answers):
        assert kind in ("CollectiveError", "ConfigError"), f"rank {rank}: {kind}"
        assert all(word in text for word in words), f"rank {rank}: {text}"
        if kind == "CollectiveError":
            assert f"rank {size - 1}" in text
            assert "test_mismatches.py:" in text
        assert seconds <= SECONDS
    assert sum(kind == "CollectiveError" for kind, _, _ in answers) >= size - 1


def send_and_receive(mesh: Mesh, sent: torch.Tensor, taken: torch.Tensor) -> str:
    try:
        if mesh.rank == 0:
            collectives.send(sent, 1)
        elif mesh.rank == 1:
            collectives.recv(taken, 0)
    except CollectiveError as error:
        return str(error)
    return ""


def test_messages_that_do_not_match_raise_on_both_ranks():
    for errors in on_mesh(2, send_and_receive, ones(3), ones(4)):
        assert "rank 0: send and recv(float32 [3])" in errors
        assert "rank 1: send and recv(float32 [4])" in errors


def send_strided(mesh: Mesh) -> str:
    """Rank 0 cannot send its tensor, and rank 1 must not wait for it."""
    try:
        if mesh.rank == 0:
            collectives.send(ones(3, 3).t(), 1)
        elif mesh.rank == 1:
            collectives.recv(ones(3, 3), 0)
    except RanklessError as error:
        return f"{type(error).__name__}{error}"
    return ""


def test_a_message_that_cannot_be_sent_raises_on_the_receiver_too():
    sender, receiver = on_mesh(2, send_strided)
    assert sender.startswith("ConfigError")
    assert receiver.startswith("CollectiveError")
    assert "invalid arguments: float32 [3, 3] with strides" in receiver


def receive_from_nobody(mesh: Mesh) -> str:
    group = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=1))
    try:
        if mesh.rank == 1:
            collectives.recv(ones(2), group=group, tag=9)
    except CollectiveError as error:
        return str(error)
    return ""


def test_a_receive_from_any_rank_times_out():
    assert "some rank to send to rank 1 with tag 9" in on_mesh(2, receive_from_nobody)[1]


def arrive_late(mesh: Mesh) -> list[str]:
    """Rank 1 calls the barrier after rank 0 has timed out."""
    errors = []
    if mesh.rank == 1:
        mesh_barrier = torch.zeros(1)
        torch.distributed.recv(mesh_barrier, 0)
    try:
        collectives.barrier(timeout=timedelta(seconds=0.3))
    except CollectiveError as error:
        errors.append(str(error))
    if mesh.rank == 0:
        torch.distributed.send(torch.zeros(1), 1)
    return errors


def test_a_barrier_names_missing_ranks_and_raises_on_a_late_rank():
    collectives_before = on_mesh(2, sum_ranks)
    assert collectives_before == [1.0, 1.0]
    on_time, too_late = on_mesh(2, arrive_late)
    assert "no call from rank 1 in 0.3 s" in on_time[0]
    assert "rank 1 was last in all_reduce" in on_time[0]
    assert "given up, because a rank did not call it in time" in too_late[0]


def sum_ranks(mesh: Mesh) -> float:
    total = torch.tensor([float(mesh.rank)])
    collectives.all_reduce(total)
    return total.item()


ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no tensor": (lambda: collectives.all_reduce(3), "expected: a tensor"),
    "two roots": (lambda: collectives.broadcast(ones(2), 0, group_src=0), "src=0 and group_src=0"),
    "a root outside": (lambda: collectives.broadcast(ones(2), 7), "src=7"),
    "a list too short": (
        lambda: collectives.all_gather([ones(2)], ones(2)),
        "tensor_list with one element for each of 2",
    ),
    "no list at the root": (lambda: collectives.gather(ones(2), None, 0), "gather_list= on rank 0"),
    "another dtype in a list": (lambda: collectives.all_gather([ones(2), ones(2).long()], ones(2)), "one dtype"),
    "no tensors": (lambda: collectives.all_gather_coalesced([[], []], []), "at least one tensor"),
    "no room for its own": (
        lambda: collectives.all_gather_coalesced([[ones(2)], [ones(2)]], [ones(3)]),
        "of this rank's inputs, [[3]]",
    ),
    "too few lists": (lambda: collectives.all_gather_coalesced([[ones(2)]], [ones(2)]), "one element for each of 2"),
    "no room": (lambda: collectives.all_gather_single(ones(3), ones(2)), "2 times as many elements"),
    "splits that do not add up": (
        lambda: collectives.all_to_all_single(ones(4), ones(4), [1, 1], None),
        "output_split_sizes= of 2 numbers that add up to the 4 rows",
    ),
    "bits of floats": (lambda: collectives.all_reduce(ones(2), ReduceOp.BAND), "band"),
    "a dtype that Gloo has not": (lambda: collectives.all_reduce(ones(2).to(torch.int16)), "int16 [2]"),
    "a message to oneself": (
        lambda: collectives.send(ones(2), torch.distributed.get_rank()),
        "another rank to send to",
    ),
    "another operation in a batch": (lambda: collectives.P2POp(collectives.send, ones(2), 0), "isend or irecv"),
    "an output list without room": (
        lambda: collectives.scatter_object_list([], [1, 2] if torch.distributed.get_rank() == 0 else None),
        "an output list with at least one element",
    ),
}


def catch_refusal(_mesh: Mesh, name: str) -> str:
    try:
        ARGUMENTS[name][0]()
    except RanklessError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_invalid_arguments_raise_on_every_rank_before_anything_is_sent(name: str):
    errors = on_mesh(2, catch_refusal, name)
    assert all(errors)
    assert any(ARGUMENTS[name][1] in text for text in errors), errors
    assert on_mesh(2, sum_ranks) == [1.0, 1.0]


def test_a_collective_before_init_raises():
    with pytest.raises(ConfigError, match=r"rankless.init\(\)"):
        collectives.all_reduce(ones(2))
