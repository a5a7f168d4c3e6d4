"""Reductions in shared memory in which a rank does not take part: the error names it."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.backends.host_layout import HostLayout, compute_host_layout
from rankless.compat.horovod.engine.backends.shared_memory import SharedMemoryBackend, open_slots
from rankless.compat.horovod.engine.backends.store_exchange import check_all_ranks, wait_for_key
from rankless.compat.horovod.engine.requests import ReduceOpCode
from rankless.compat.horovod.engine.scaling import ScaledReduction

SOON = 0.05


class Gone(Exception):
    """A peer is gone."""


def fine() -> None:
    """All peers are there."""


def gone() -> None:
    raise Gone


def store() -> dist.HashStore:
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=60))
    return made


def test_a_rank_missing_in_a_reduction_is_named_by_its_rank_in_the_job():
    shared = store()
    slots = open_slots(shared, ranks=(4, 6), index=0, check=fine, timeout_seconds=SOON)
    os.unlink(shared.get("memory").decode())
    assert slots is not None
    backend = SharedMemoryBackend(slots, check=fine, timeout_seconds=SOON)
    ones = torch.ones(3)
    with pytest.raises(HorovodInternalError, match=r"rank 6 did not take part within 0\.05 s\nfix:"):
        backend.allreduce([ones], [ones], ScaledReduction(ReduceOpCode.SUM, 1.0, 1.0, 2))


def test_waiting_for_a_key_that_nobody_sets_times_out():
    with pytest.raises(HorovodInternalError, match=r"found: +some had not after 0\.05 s\nfix:"):
        open_slots(store(), ranks=(0, 1), index=1, check=fine, timeout_seconds=SOON)
    with pytest.raises(HorovodInternalError, match="some had not"):
        check_all_ranks(store(), True, size=2, check=fine, timeout_seconds=SOON)


def test_a_peer_that_is_gone_ends_the_wait_at_once():
    with pytest.raises(Gone):
        wait_for_key(store(), "memory", check=gone, timeout_seconds=60)


@pytest.mark.parametrize(("flags", "expected"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_the_flag_is_true_only_if_it_is_true_on_all_ranks(flags: tuple[bool, bool], expected: bool):
    shared = store()
    with pytest.raises(HorovodInternalError):
        check_all_ranks(shared, flags[0], size=2, check=fine, timeout_seconds=0)
    assert check_all_ranks(shared, flags[1], size=2, check=fine, timeout_seconds=0) is expected
    assert bool(int(shared.get("all have"))) is expected


def test_hosts_with_equally_many_ranks_have_a_layout():
    hosts = ["a", "b", "a", "b", "c"]
    assert compute_host_layout([0, 1, 2, 3], hosts, 3) == HostLayout(
        host_index=1, host_count=2, local_index=1, ranks=(1, 3)
    )
    assert compute_host_layout([0, 2], hosts, 2) == HostLayout(host_index=0, host_count=1, local_index=1, ranks=(0, 2))
    assert compute_host_layout([0, 1], hosts, 0) is None
    assert compute_host_layout([0, 1, 2, 3, 4], hosts, 0) is None
