"""Ranks that are killed, stopped or abort at random points end the calls of the others soon, and leave nothing open."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import list_open, make_group
from collectives.backends.test_group_faults import make_calls, own_workers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import on_mesh

from rankless.collectives.backends import close_shared_memory_group
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

MOST_SECONDS = 2.0
MOST_CALLS = 100_000
STOP_TIMEOUT_SECONDS = 1.0
"""A stopped process cannot be told from a busy one. Only the timeout of the group ends the calls of the others."""


Fault = tuple[str, int, int, int]
"""What happens, to which rank, after how many calls, and how many microseconds later: in the middle of a call."""


def fail(group: Any, how: str, folder: str) -> None:
    """Note the time, and fail."""
    (Path(folder) / "time").write_text(str(time.monotonic()))
    if how == "aborting":
        group.abort()
    else:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def fail_at(mesh: Mesh, fault: Fault, folder: str) -> tuple[str, float, bool]:
    """Make calls until one rank fails; return the error, when it was raised, and whether nothing stays open."""
    how, failing_rank, last_call, delay_microseconds = fault
    processes: list[Any] = [None] * mesh.size
    dist.all_gather_object(processes, os.getpid(), group=mesh.group)
    before = list_open()
    group = make_group(mesh, list(range(mesh.size)), STOP_TIMEOUT_SECONDS if how == "stopped" else 30.0)
    error, raised = "", 0.0
    failing = threading.Timer(delay_microseconds / 1e6, fail, (group, how, folder))
    for number in range(MOST_CALLS):
        if number == last_call and mesh.rank == failing_rank:
            failing.start()
        try:
            make_calls(group, mesh.rank, number)
        except CollectiveError as caught:
            error, raised = str(caught), time.monotonic()
            break
    if how == "stopped" and mesh.rank != failing_rank:
        os.kill(processes[failing_rank], signal.SIGCONT)
    if mesh.rank == failing_rank:
        failing.join()
    close_shared_memory_group(group)
    del group, failing
    return error, raised, list_open() == before


EXPECTED = {
    "killed": "the process of rank {rank} has ended",
    "aborting": "rank {rank} aborted the group",
    "stopped": "rank {rank} did not take part within 1 s",
}


def check_fault(fault: Fault, size: int, folder: Path) -> float:
    """Return after how many seconds the last rank raised."""
    how, failing_rank, *_ = fault
    if how == "killed":
        with own_workers(size) as pool:
            answers = pool.call(fail_at, (fault, str(folder)))
        assert isinstance(answers.pop(failing_rank), RuntimeError)
    else:
        answers = on_mesh(size, fail_at, fault, str(folder))
        if how == "stopped":
            answers.pop(failing_rank)
    start = float((folder / "time").read_text())
    for error, _, is_closed in answers:
        assert EXPECTED[how].format(rank=failing_rank) in error, error
        assert is_closed
    return max(raised for _, raised, _ in answers) - start


def list_shared_files() -> set[str]:
    """Return the files of shared memory of any process that have a name."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("rankless-")}


def faults() -> Any:
    return st.tuples(st.sampled_from(sorted(EXPECTED)), st.integers(0, 2), st.integers(0, 7), st.integers(0, 5000))


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
@given(fault=faults())
def test_random_faults_end_the_calls_of_the_others_soon(fault: Fault, tmp_path_factory: pytest.TempPathFactory):
    assert check_fault(fault, 3, tmp_path_factory.mktemp("fault")) < MOST_SECONDS


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(fault=faults())
def test_two_hundred_random_faults_end_the_calls_of_the_others_soon(
    fault: Fault, tmp_path_factory: pytest.TempPathFactory
):
    seconds = check_fault(fault, 3, tmp_path_factory.mktemp("fault"))
    print(f"{fault[0]} {seconds:.3f} s")
    assert seconds < MOST_SECONDS


def wait_for_a_rank_that_is_killed(mesh: Mesh, folder: str) -> tuple[str, float]:
    group = make_group(mesh, list(range(mesh.size)), 300.0)
    if mesh.rank == 1:
        dist.barrier(group=mesh.group)
        # The other rank must sleep in its collective before this one ends.
        state = Path(folder) / "process"
        while not _sleeps(int(state.read_text())):
            pass
        (Path(folder) / "time").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(folder) / "process").write_text(str(os.getpid()))
    dist.barrier(group=mesh.group)
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(1000), group=group)
    raised = time.monotonic()
    close_shared_memory_group(group)
    return str(caught.value), raised


def _sleeps(process_id: int) -> bool:
    """Whether the main thread of a process waits on a futex."""
    return "futex" in Path(f"/proc/{process_id}/wchan").read_text() or (
        Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    )


def test_a_killed_rank_is_noticed_by_its_process_and_not_by_the_timeout(tmp_path: Path):
    with own_workers(2) as pool:
        answers = pool.call(wait_for_a_rank_that_is_killed, (str(tmp_path),))
    error, raised = answers[0]
    seconds = raised - float((tmp_path / "time").read_text())
    print(f"noticed after {1000 * seconds:.1f} ms")
    assert "the process of rank 1 has ended" in error
    assert seconds < MOST_SECONDS


def test_nothing_with_a_name_stays_in_shared_memory_after_a_fault(tmp_path: Path):
    before = list_shared_files()
    check_fault(("killed", 0, 3, 0), 3, tmp_path)
    assert not {name for name in list_shared_files() - before if _is_ours(name)}


def _is_ours(name: str) -> bool:
    """Whether a file in shared memory lives longer than a group needs its name. Other tests may run beside this one."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not os.path.exists(f"/dev/shm/{name}"):
            return False
    return True
