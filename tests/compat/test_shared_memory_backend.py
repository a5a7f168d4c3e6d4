"""Reductions in memory that ranks share, where one of them does not come: who it is, is said."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.backends.host_layout import Layout, layout_of
from rankless.compat.horovod.engine.backends.shared_memory import SharedMemoryPlane, open_slots
from rankless.compat.horovod.engine.backends.store_exchange import all_have, awaited
from rankless.compat.horovod.engine.requests import Reduction
from rankless.compat.horovod.engine.scaling import Reducing

SOON = 0.05


class Gone(Exception):
    """A peer is."""


def fine() -> None:
    """All peers are there."""


def gone() -> None:
    raise Gone


def store() -> dist.HashStore:
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=60))
    return made


def test_who_does_not_come_to_a_reduction_is_named_by_its_rank_in_the_job():
    shared = store()
    slots = open_slots(shared, ranks=(4, 6), place=0, check=fine, timeout_seconds=SOON)
    os.unlink(shared.get("memory").decode())
    assert slots is not None
    plane = SharedMemoryPlane(slots, check=fine, timeout_seconds=SOON)
    ones = torch.ones(3)
    with pytest.raises(HorovodInternalError, match=r"no sign of rank 6 for 0\.05 s\nfix:"):
        plane.allreduce([ones], [ones], Reducing(Reduction.SUM, 1.0, 1.0, 2))


def test_what_nobody_sets_is_not_awaited_for_ever():
    with pytest.raises(HorovodInternalError, match=r"found: +some had not after 0\.05 s\nfix:"):
        open_slots(store(), ranks=(0, 1), place=1, check=fine, timeout_seconds=SOON)
    with pytest.raises(HorovodInternalError, match="some had not"):
        all_have(store(), True, size=2, check=fine, timeout_seconds=SOON)


def test_a_peer_that_is_gone_ends_the_wait_at_once():
    with pytest.raises(Gone):
        awaited(store(), "memory", check=gone, timeout_seconds=60)


@pytest.mark.parametrize(("said", "wanted"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_all_have_something_only_if_each_says_so(said: tuple[bool, bool], wanted: bool):
    shared = store()
    with pytest.raises(HorovodInternalError):
        all_have(shared, said[0], size=2, check=fine, timeout_seconds=0)
    assert all_have(shared, said[1], size=2, check=fine, timeout_seconds=0) is wanted
    assert bool(int(shared.get("all have"))) is wanted


def test_hosts_with_equally_many_ranks_have_a_layout():
    hosts = ["a", "b", "a", "b", "c"]
    assert layout_of([0, 1, 2, 3], hosts, 3) == Layout(host=1, host_count=2, local_place=1, ranks=(1, 3))
    assert layout_of([0, 2], hosts, 2) == Layout(host=0, host_count=1, local_place=1, ranks=(0, 2))
    assert layout_of([0, 1], hosts, 0) is None
    assert layout_of([0, 1, 2, 3, 4], hosts, 0) is None
