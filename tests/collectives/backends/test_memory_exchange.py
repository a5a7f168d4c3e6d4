"""Processes of one host find one memory in every way; without memory, all of them learn that there is none."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from collectives.backends.shared_groups import list_open, new_store
from support.processes import Pool, on_mesh

from rankless.collectives.backends import make_shared_memory_group, shared_group, shared_memory_mapping
from rankless.collectives.backends.peer_liveness import PeerProcesses, ProcessIdentity
from rankless.collectives.backends.shared_memory_mapping import WAYS, open_shared_region
from rankless.collectives.backends.store_exchange import StoreExchange
from rankless.config import shared_memory_support
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

TIMEOUT = timedelta(seconds=20)


def share(mesh: Mesh, ways: list[Any], closed: str) -> tuple[list[int], bool]:
    """Each rank writes into the memory; return what it finds there, and whether nothing stays open."""
    before, way_of_opening = list_open(), shared_memory_mapping._open_same_file
    try:
        if closed == "proc":
            shared_memory_mapping._open_same_file = lambda *_: None
        exchange = StoreExchange(new_store(mesh), "test", rank=mesh.rank, size=mesh.size, timeout=TIMEOUT)
        region = open_shared_region(exchange, 4096, ways)
        if region is None:
            return [], before == list_open()
        region.bytes[mesh.rank] = mesh.rank + 1
        exchange.gather("written", "yes")
        found = region.bytes[: mesh.size].tolist()
        exchange.gather("read", "yes")
        paths = {
            line.split(maxsplit=5)[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "rankless-" in line
        }
        assert all(path.endswith("(deleted)") for path in paths)
        del region
        return found, before == list_open()
    finally:
        shared_memory_mapping._open_same_file = way_of_opening


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("ways", "closed"),
    [(list(WAYS), ""), (["proc"], ""), (["socket"], ""), (list(WAYS), "proc"), (["file"], "")],
    ids=["any", "proc", "socket", "proc is closed", "file"],
)
def test_ranks_share_memory_that_they_pass_on_in_every_way(ways: list[Any], closed: str):
    assert on_mesh(3, share, ways, closed) == [([1, 2, 3], True)] * 3


def test_ranks_without_a_way_to_share_memory_get_none():
    assert on_mesh(2, share, ["proc"], "proc") == [([], True)] * 2
    assert on_mesh(2, share, [], "") == [([], True)] * 2


def make_group_with(mesh: Mesh, name: str, odd_rank: int) -> bool:
    """Make a group where one rank is on another host, or has another machine, or rank 0 has no memory."""
    replaced = {
        "host": (shared_group, "host_identity", lambda: "another host"),
        "machine": (shared_memory_support, "has_ordered_stores", lambda: False),
        "memory": (shared_memory_mapping, "_create", lambda *_: (None, "")),
    }
    module, function, value = replaced[name]
    original = getattr(module, function)
    store, before = new_store(mesh), list_open()
    try:
        if mesh.rank == odd_rank:
            setattr(module, function, value)
        group = make_shared_memory_group(store, mesh.rank, mesh.size, list(range(mesh.size)), TIMEOUT)
    finally:
        setattr(module, function, original)
    assert list_open() == before
    return group is None


@pytest.mark.parametrize("name", ["host", "machine", "memory"])
@pytest.mark.ci_sample(1)
def test_a_group_that_cannot_share_memory_is_none_on_all_ranks(name: str):
    assert on_mesh(2, make_group_with, name, 0) == [True, True]


def test_a_machine_that_swaps_stores_is_not_supported_and_says_why(monkeypatch: pytest.MonkeyPatch):
    assert shared_memory_support.is_supported()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not shared_memory_support.is_supported()
    assert "aarch64" in shared_memory_support.is_supported().reason
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "Darwin" in shared_memory_support.is_supported().reason


def make_group_alone(mesh: Mesh) -> str:
    store = new_store(mesh)
    if mesh.rank == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        make_shared_memory_group(store, mesh.rank, 2, [0, 1], timedelta(seconds=0.2))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    assert "rank 1 of the group did not within 0.2 s" in on_mesh(2, make_group_alone)[0]


def end_while_the_group_opens(mesh: Mesh) -> str:
    store = new_store(mesh)
    if mesh.rank == 1:
        shared_group.open_shared_region = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as caught:
        make_shared_memory_group(store, mesh.rank, mesh.size, list(range(mesh.size)), TIMEOUT)
    return str(caught.value)


def test_a_rank_that_ends_while_the_group_opens_is_named():
    pool = Pool(2)
    try:
        answers = pool.call(end_while_the_group_opens, ())
    finally:
        pool.close()
    assert "the process of rank 1 has ended" in answers[0]


@pytest.mark.parametrize("use_descriptors", [True, False])
def test_an_ended_process_is_found_with_and_without_pidfds(use_descriptors: bool):
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    identity = ProcessIdentity(child, int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]))
    reused = ProcessIdentity(child, identity.start_ticks - 1)
    peers = PeerProcesses({3: identity, 5: reused, 7: ProcessIdentity.own()}, use_descriptors=use_descriptors)
    assert peers.find_ended() == {5}
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert peers.find_ended() == {3, 5}  # a zombie, not yet reaped
    os.waitpid(child, 0)
    assert peers.find_ended() == {3, 5}
    peers.close()
    assert peers.find_ended() == set()


def test_the_futex_of_this_machine_is_known():
    assert torch.cuda.is_available() or shared_memory_support.find_futex_number() is not None
