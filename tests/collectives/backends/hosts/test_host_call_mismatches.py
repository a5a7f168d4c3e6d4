"""Ranks of different hosts that make different calls all raise the same error, which names the ranks and the calls."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import make_group
from support.processes import on_mesh

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

TIMEOUT_SECONDS = 20.0
MOST_SECONDS = 8.0
"""Less than the timeout: calls that differ are found, they do not time out."""


@dataclass(frozen=True)
class CallingRank:
    """A rank that makes a call, and whether its call is the one that differs."""

    group: Any
    rank: int
    size: int
    odd: bool = False


Call = Callable[[CallingRank], Any]
COLLECTIVES: dict[str, tuple[Call, str]] = {
    "all_reduce": (lambda at: dist.all_reduce(torch.ones(8), group=at.group), "all_reduce(SUM, float32, 8"),
    "long all_reduce": (
        lambda at: dist.all_reduce(torch.ones(400_000), group=at.group),
        "all_reduce(SUM, float32, 400000",
    ),
    "reduce": (lambda at: dist.reduce(torch.ones(8), group_dst=0, group=at.group), "reduce(SUM, float32"),
    "reduce_scatter": (
        lambda at: dist.reduce_scatter_single(torch.ones(8), torch.ones(8 * at.size), group=at.group),
        "reduce_scatter(SUM, float32",
    ),
    "broadcast": (
        lambda at: dist.broadcast(torch.ones(8), group_src=0, group=at.group),
        "broadcast(root 0, 32 bytes)",
    ),
    "all_gather": (
        lambda at: dist.all_gather([torch.ones(8) for _ in range(at.size)], torch.ones(8), group=at.group),
        "all_gather(",
    ),
    "gather": (
        lambda at: dist.gather(
            torch.ones(8),
            [torch.ones(8) for _ in range(at.size)] if at.rank == 0 else None,
            group_dst=0,
            group=at.group,
        ),
        "gather(root 0, 32 bytes)",
    ),
    "scatter": (
        lambda at: dist.scatter(
            torch.ones(8),
            [torch.ones(8) for _ in range(at.size)] if at.rank == 0 else None,
            group_src=0,
            group=at.group,
        ),
        "scatter(root 0, 32 bytes)",
    ),
    "all_to_all": (
        lambda at: dist.all_to_all_single(torch.ones(at.size), torch.ones(at.size), group=at.group),
        "all_to_all(",
    ),
    "barrier": (lambda at: dist.barrier(group=at.group), "barrier("),
}


def catch(mesh: Mesh, hosts: str, make: Callable[[Any], Any]) -> str:
    """Make calls on a new group; return the error, which must come before the timeout."""
    group = make_group(mesh, hosts, timeout_seconds=TIMEOUT_SECONDS)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        make(group)
    assert time.monotonic() - start < MOST_SECONDS
    with pytest.raises(CollectiveError):
        dist.barrier(group=group)
    dist.barrier(group=mesh.group)
    dist.destroy_process_group(group)
    return str(caught.value)


def require_one_text(answers: list[str], *found: str) -> None:
    """All ranks have the same error, and it has these texts."""
    assert len(set(answers)) == 1, answers
    for text in found:
        assert text in answers[0], answers[0]


def call_pairs(mesh: Mesh, hosts: str, pairs: list[tuple[str, str]]) -> list[str]:
    """For each pair, the ranks of host "a" make the first call and the others the second; return the errors."""
    return [
        catch(
            mesh,
            hosts,
            lambda group, pair=pair: COLLECTIVES[pair[hosts[mesh.rank] != "a"]][0](
                CallingRank(group, mesh.rank, mesh.size)
            ),
        )
        for pair in pairs
    ]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aabb", pytest.param("abb", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("first", COLLECTIVES)
def test_every_pair_of_different_collectives_on_two_hosts_is_an_error(hosts: str, first: str):
    pairs = [(first, second) for second in COLLECTIVES if second != first]
    answers = on_mesh(len(hosts), call_pairs, hosts, pairs)
    for (one, other), *errors in zip(pairs, *answers, strict=True):
        # Of two hosts either may be named as the one that differs.
        require_one_text(errors, f": {COLLECTIVES[one][1]}", f": {COLLECTIVES[other][1]}", "call of rank ")


def call_with_the_odd_host_in_the_middle(mesh: Mesh, pairs: list[tuple[str, str]]) -> list[str]:
    return [
        catch(
            mesh,
            "aabbcc",
            lambda group, pair=pair: COLLECTIVES[pair[mesh.rank in (2, 3)]][0](
                CallingRank(group, mesh.rank, mesh.size)
            ),
        )
        for pair in pairs
    ]


@pytest.mark.slow
def test_of_three_hosts_the_one_in_the_middle_is_named():
    pairs = [*itertools.pairwise(COLLECTIVES), ("gather", "all_reduce"), ("broadcast", "all_to_all")]
    answers = on_mesh(6, call_with_the_odd_host_in_the_middle, pairs)
    for (one, other), *errors in zip(pairs, *answers, strict=True):
        require_one_text(errors, f"rank 2: {COLLECTIVES[other][1]}", f"call of rank 0: {COLLECTIVES[one][1]}")


DIFFERENT_VALUES: dict[str, tuple[Call, str, str]] = {
    "lengths": (
        lambda at: dist.all_reduce(torch.ones(10 + at.odd), group=at.group),
        "all_reduce(SUM, float32, 11 values)",
        "all_reduce(SUM, float32, 10 values)",
    ),
    "many and few": (
        lambda at: dist.all_reduce(torch.ones(2 if at.odd else 1 << 20), group=at.group),
        "all_reduce(SUM, float32, 2 values)",
        "1048576 values",
    ),
    "none and some": (
        lambda at: dist.all_reduce(torch.ones(0 if at.odd else 3), group=at.group),
        "all_reduce(SUM, float32)",
        "3 values",
    ),
    "long broadcasts": (
        lambda at: dist.broadcast(torch.ones((1 << 20) + at.odd), group_src=0, group=at.group),
        "4194308 bytes",
        "4194304 bytes",
    ),
    "broadcasts": (
        lambda at: dist.broadcast(torch.ones(4 - at.odd), group_src=0, group=at.group),
        "12 bytes",
        "16 bytes",
    ),
    "gathered": (
        lambda at: dist.all_gather(
            [torch.ones(3 + at.odd) for _ in range(at.size)], torch.ones(3 + at.odd), group=at.group
        ),
        "all_gather(",
        "all_gather(",
    ),
    "uneven gathers": (
        lambda at: dist.all_gather(
            [torch.ones(2 + (peer == 0) + (peer == at.size - 1 and at.odd)) for peer in range(at.size)],
            torch.ones(2 + (at.rank == 0) + (at.rank == at.size - 1 and at.odd)),
            group=at.group,
        ),
        "number differs by rank, with checksum",
        "number differs by rank, with checksum",
    ),
    "gathers": (
        lambda at: dist.gather(
            torch.ones(90_000 if at.odd else 4),
            [torch.ones(90_000 if at.odd else 4) for _ in range(at.size)] if at.rank == 0 else None,
            group_dst=0,
            group=at.group,
        ),
        "gather(root 0, 360000 bytes)",
        "gather(root 0, 16 bytes)",
    ),
    "scatters": (
        lambda at: dist.scatter(
            torch.ones(5 + at.odd),
            [torch.ones(5 + at.odd) for _ in range(at.size)] if at.rank == 0 else None,
            group_src=0,
            group=at.group,
        ),
        "scatter(root 0, 24 bytes)",
        "scatter(root 0, 20 bytes)",
    ),
    "dtypes": (
        lambda at: dist.all_reduce(torch.ones(10, dtype=torch.int32 if at.odd else torch.float32), group=at.group),
        "all_reduce(SUM, int32, 10 values)",
        "all_reduce(SUM, float32, 10 values)",
    ),
    "reductions": (
        lambda at: dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if at.odd else dist.ReduceOp.SUM, group=at.group),
        "all_reduce(MAX, float32, 10 values)",
        "all_reduce(SUM, float32, 10 values)",
    ),
    "averages": (
        lambda at: dist.all_reduce(torch.ones(10), dist.ReduceOp.AVG if at.odd else dist.ReduceOp.SUM, group=at.group),
        "all_reduce(AVG, float32, 10 values)",
        "all_reduce(SUM, float32, 10 values)",
    ),
    "roots": (
        lambda at: dist.broadcast(torch.ones(4), group_src=at.size - 1 if at.odd else 0, group=at.group),
        "broadcast(root 3",
        "broadcast(root 0",
    ),
    "roots of reduce": (
        lambda at: dist.reduce(torch.ones(4), group_dst=1 if at.odd else 0, group=at.group),
        "root 1",
        "root 0",
    ),
    "reduce_scatters": (
        lambda at: dist.reduce_scatter(
            torch.ones([3, 2, 2, 2, 2][at.rank + at.odd]),
            [torch.ones([3, 2, 2, 2, 2][peer + at.odd]) for peer in range(at.size)],
            group=at.group,
        ),
        "reduce_scatter(SUM, float32, 8 values)",
        "number differs by rank, with checksum",
    ),
}


def call_with_different_values(mesh: Mesh, hosts: str, odd: list[int]) -> list[str]:
    return [
        catch(mesh, hosts, lambda group, make=make: make(CallingRank(group, mesh.rank, mesh.size, mesh.rank in odd)))
        for make, _, _ in DIFFERENT_VALUES.values()
    ]


@pytest.mark.slow
def test_equal_collectives_with_different_values_on_two_hosts_are_an_error():
    answers = on_mesh(4, call_with_different_values, "aabb", [2, 3])
    for (_, other, one), *errors in zip(DIFFERENT_VALUES.values(), *answers, strict=True):
        require_one_text(errors, "rank 2: ", other, "to match the call of rank 0", one)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [1, 3])
def test_one_rank_beside_the_first_of_its_host_that_calls_something_else_is_an_error_on_all(odd: int):
    answers = on_mesh(4, call_with_different_values, "aabb", [odd])
    for name, *errors in zip(DIFFERENT_VALUES, *answers, strict=True):
        require_one_text(errors, f"rank {odd}", "to match the call of")
        assert name


def swap_calls(mesh: Mesh, is_async: bool) -> str:
    def make(group: Any) -> None:
        calls = [
            lambda: dist.all_reduce(torch.ones(8), group=group, async_op=is_async),
            lambda: dist.broadcast(torch.ones(8), group_src=0, group=group, async_op=is_async),
        ]
        started = [call() for call in (calls if mesh.rank < 2 else reversed(calls))]
        for work in filter(None, started):
            work.wait()

    return catch(mesh, "aabb", make)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_in_another_order_on_another_host_are_an_error(is_async: bool):
    require_one_text(on_mesh(4, swap_calls, is_async), "rank 2: broadcast(root 0", "call of rank 0: all_reduce(SUM")


def call_once_more(mesh: Mesh, hosts: str, odd: str) -> tuple[str, float]:
    """The ranks of one host make a call more at the end than the others, which close the group."""
    group = make_group(mesh, hosts, timeout_seconds=3.0)
    start, error = time.monotonic(), ""
    dist.all_reduce(torch.ones(8), group=group)
    if hosts[mesh.rank] == odd:
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(torch.ones(8), group=group)
        error = str(caught.value)
    seconds = time.monotonic() - start
    dist.barrier(group=mesh.group)
    dist.destroy_process_group(group)
    return error, seconds


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("odd", ["a", "b"])
def test_a_call_more_on_one_host_ends_after_the_timeout(odd: str):
    answers = [answer for rank, answer in enumerate(on_mesh(4, call_once_more, "aabb", odd)) if "aabb"[rank] == odd]
    require_one_text([error for error, _ in answers], "did not take part within 3 s")
    assert all(seconds < 3 * MOST_SECONDS for _, seconds in answers)


def exchange_uneven_messages(mesh: Mesh) -> str:
    sizes = torch.ones(mesh.size, mesh.size, dtype=torch.int64)

    def make(group: Any) -> None:
        received, sent = sizes[:, mesh.rank].tolist(), sizes[mesh.rank].tolist()
        if mesh.rank == 3:
            sent[0] = 50_000
        dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, group=group)

    return catch(mesh, "aabb", make)


@pytest.mark.slow
def test_an_all_to_all_whose_lengths_do_not_match_is_an_error_on_all_ranks():
    answers = on_mesh(4, exchange_uneven_messages)
    require_one_text(answers, "rank 3: it sends 200000 bytes to rank 0", "receives 4 bytes from it")


def call_in_a_subgroup(mesh: Mesh) -> str:
    group = make_group(mesh, "aabb", [1, 2, 3], timeout_seconds=TIMEOUT_SECONDS)
    error = ""
    if mesh.rank:
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(torch.ones(4 if mesh.rank == 1 else 5), group=group)
        error = str(caught.value)
    dist.barrier(group=mesh.group)
    if mesh.rank:
        dist.destroy_process_group(group)
    return error


@pytest.mark.slow
def test_the_error_of_a_group_of_some_ranks_has_the_ranks_of_the_job():
    _, *answers = on_mesh(4, call_in_a_subgroup)
    require_one_text(answers, "rank 2: all_reduce(SUM, float32, 5 values)", "call of rank 1")
