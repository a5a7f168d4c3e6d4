"""Horovod's operations on the groups of `collectives.backends`: on acting hosts, with faults, and what stays open."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from collectives.backends.shared_groups import list_open
from support.horovod_ranks import error_of
from support.processes import on_mesh

from rankless.extensions.horovod import context
from rankless.extensions.horovod.engine import execution, rendezvous
from rankless.extensions.horovod.engine.backends import SharedMemoryBackend
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow
COUNT = 40_000


def run_on_hosts(mesh: Mesh, hosts: str, timeout_seconds: float, call: Callable[..., Any]) -> Any:
    """Call a function between init and shutdown. Each rank acts as if it were on the host that its letter names."""
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # most tests' workers never need it

    changed = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(timeout_seconds)}
    with (
        mock.patch.object(rendezvous, "host_identity", return_value=hosts[mesh.rank]),
        mock.patch.dict(os.environ, changed),
    ):
        hvd.init()
        try:
            return call(hvd)
        finally:
            hvd.shutdown()


def call_all_operations(hvd: Any) -> list[str]:
    """Return the names of operations with wrong results."""
    rank, size = hvd.rank(), hvd.size()
    wrong = []

    def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found, wanted):
            wrong.append(name)

    for dtype in (torch.int16, torch.bool, torch.bfloat16, torch.float64):
        given = [((torch.arange(COUNT) * (one + 1)) % 3).to(dtype) for one in range(size)]
        rows = torch.stack(given).double()
        total = rows.amax(0) if dtype is torch.bool else rows.sum(0)
        own, name = given[rank], str(dtype)
        check(
            f"sum {name}",
            hvd.allreduce(own, op=hvd.Sum, name=name).double(),
            total.clamp(max=1 if dtype is torch.bool else 99),
        )
        check(
            f"gather {name}",
            hvd.allgather(own[: COUNT - rank], name=name),
            torch.cat([one[: COUNT - other] for other, one in enumerate(given)]),
        )
        check(f"broadcast {name}", hvd.broadcast(own, size - 1, name=name), given[-1])
    grouped = hvd.grouped_allreduce(
        [torch.full((count,), float(rank)) for count in (COUNT, 0, 3, 300_000)], name="group"
    )
    check("group", torch.cat(grouped), torch.full((COUNT + 300_003,), (size - 1) / 2))
    splits = [(rank + other) % size * 10_000 for other in range(size)]
    found, _ = hvd.alltoall(
        torch.full((sum(splits),), float(rank)), torch.tensor(splits, dtype=torch.int32), name="all"
    )
    check(
        "alltoall",
        found,
        torch.cat([torch.full(((rank + other) % size * 10_000,), float(other)) for other in range(size)]),
    )
    scattered = hvd.reducescatter(torch.ones(size + 1, COUNT), op=hvd.Sum, name="scatter", postscale_factor=2.0)
    check("reducescatter", scattered, torch.full((2 if rank == 0 else 1, COUNT), 2.0 * size))
    few = hvd.reducescatter(torch.ones(1, COUNT), op=hvd.Sum, name="few")
    check("few rows", few, torch.full((1 if rank == 0 else 0, COUNT), float(size)))
    return wrong


def on_hosts(mesh: Mesh, hosts: str) -> tuple[list[str], list[str]]:
    names: list[str] = []

    def call(hvd: Any) -> list[str]:
        found = call_all_operations(hvd)
        backends = context.current().scheduler._executor._backends
        names.extend(backend.name for backend in backends.values())
        return found

    return run_on_hosts(mesh, hosts, 60, call), names


@pytest.mark.parametrize(
    ("hosts", "name"), [("aa", "SHARED_MEMORY"), ("aab", "HIERARCHICAL"), ("aaa", "SHARED_MEMORY"), ("ab", "GLOO")]
)
def test_all_operations_use_the_fastest_group_of_the_hosts(hosts: str, name: str):
    assert on_mesh(len(hosts), on_hosts, hosts) == [([], [name])] * len(hosts)


def hold_back(mesh: Mesh, hosts: str) -> tuple[str, str] | None:
    """Keep the last rank from an operation that it has submitted, as if its process had been stopped."""
    may_go_on = threading.Event()
    original = SharedMemoryBackend.allreduce

    def late(self: Any, *arguments: Any) -> None:
        may_go_on.wait(5)
        original(self, *arguments)

    def call(hvd: Any) -> tuple[str, str] | None:
        hvd.allreduce(torch.ones(COUNT))
        if hvd.rank() < hvd.size() - 1:
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))
        with mock.patch.object(SharedMemoryBackend, "allreduce", late):
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))

    return run_on_hosts(mesh, hosts, 0.5, call)


def test_every_error_names_the_late_rank_and_what_waits_longer():
    # The first rank that notices shuts Horovod down; the others must not raise only that.
    for found in on_mesh(3, hold_back, "aaa"):
        assert found is not None
        assert found[0] == "HorovodInternalError"
        assert "rank 2 did not take part within 0.5 s" in found[1]
        assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in found[1]


def fail_to_open(mesh: Mesh, hosts: str) -> tuple[str, str] | None:
    """Let the last rank leave Horovod instead of opening the group."""

    def call(hvd: Any) -> tuple[str, str] | None:
        if hvd.rank() < hvd.size() - 1:
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))
        with mock.patch.object(execution, "open_backend", side_effect=OSError("no descriptor is left")):
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))

    return run_on_hosts(mesh, hosts, 600, call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_ranks_that_open_a_group_do_not_wait_for_one_that_has_left(hosts: str):
    *others, last = on_mesh(len(hosts), fail_to_open, hosts)
    assert "no descriptor is left" in last[1]
    assert all("Horovod has been shut down" in one[1] for one in others), others


def leave_in_an_operation(mesh: Mesh, hosts: str) -> tuple[str, str] | None:
    """Let the last rank fail in an operation before it takes part, and then leave."""

    def call(hvd: Any) -> tuple[str, str] | None:
        hvd.allreduce(torch.ones(COUNT))
        if hvd.rank() < hvd.size() - 1:
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))
        with mock.patch.object(SharedMemoryBackend, "allreduce", side_effect=ValueError("from the last rank")):
            return error_of(lambda: hvd.allreduce(torch.ones(COUNT)))

    return run_on_hosts(mesh, hosts, 600, call)


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_an_operation_does_not_wait_for_a_rank_that_has_left(hosts: str):
    *others, last = on_mesh(len(hosts), leave_in_an_operation, hosts)
    assert "from the last rank" in last[1]
    assert all("Horovod has been shut down" in one[1] for one in others), others


def list_after_many_sets(_: Mesh) -> tuple[list[str], list[str], list[str]]:
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # most tests' workers never need it

    before = list_open()
    between: list[str] = []
    with mock.patch.dict(os.environ, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}):
        for turn in range(3):
            hvd.init()
            hvd.allreduce(torch.ones(COUNT), name="all")
            only = list_open()
            for ranks in ([0, 1], [1, 2]):
                added = hvd.add_process_set(ranks)
                if added.included():
                    hvd.allgather(torch.ones(COUNT), name=f"some {turn}", process_set=added)
                hvd.remove_process_set(added)
            between += (Counter(list_open()) - Counter(only)).elements()
            hvd.shutdown()
    return before, between, list_open()


@pytest.mark.exhaustive
def test_removed_sets_and_shutdowns_leave_nothing_open():
    for before, between, after in on_mesh(3, list_after_many_sets):
        assert between == []
        assert after == before
