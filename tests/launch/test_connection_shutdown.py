"""Stop a job whose ranks wait in a collective for a rank that does not answer: their cleanup code runs.

These tests use a longer grace period than users do. On a busy machine a rank may get no processor time for a second
or more, and the default grace period would then end during its cleanup.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import is_alive, kill_job, read_process_ids, start_rankless, wait_until

from rankless.launch.watchdog.process_activity import MAX_SWITCHES_PER_SECOND, read_process_stats
from rankless.runtime.linux_process_control import descendants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="connections are cut by Linux's pidfd_getfd"),
]

GRACE_SECONDS = 6.0
PATIENT = f"""
import sys
from rankless.cli import main
from rankless.launch.supervisor import supervisor

supervisor.STOP_GRACE_SECONDS = {GRACE_SECONDS}
sys.argv[2:2] = ["--grace-seconds", "{GRACE_SECONDS}"]
sys.exit(main())
"""
PATIENT_RANKLESS = (sys.executable, "-c", PATIENT)
SCRIPT = """
import collections, itertools, os, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

def note(name):
    with open(f"{name}{rank}.txt", "w") as file:
        file.write("done")

if "handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: note("handled"))

def mark():
    with open(f"rank{rank}.pid", "w") as file:
        print(os.getpid(), file=file)

dist.barrier()
is_last = rank == dist.get_world_size() - 1
if is_last and "stopped" in sys.argv:
    mark()
    os.kill(os.getpid(), signal.SIGSTOP)
if is_last and "deaf" in sys.argv:
    mark()
    collections.deque(itertools.repeat(0), maxlen=0)  # C code that holds the interpreter lock and heeds no signal
try:
    mark()
    while True:
        dist.all_reduce(torch.ones(2))
except RuntimeError:
    note("raised")
finally:
    if "slow" in sys.argv:
        note("cleaning")
        while not os.path.exists("go_on"):
            time.sleep(0.01)
    note("cleaned")
"""


def notes(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.txt")}


def all_wait(process_ids: Sequence[int], seconds: float = 0.3) -> Callable[[], bool]:
    """Return a test of whether these processes wait: few context switches in `seconds`.

    A rank sleeps in C++ with Gloo. In shared memory it wakes 20 times per second.
    """
    seen: list[int] = []
    since = time.monotonic()

    def wait() -> bool:
        nonlocal seen, since
        now = [stats.context_switches for each in process_ids if (stats := read_process_stats(each)) is not None]
        if len(seen) != len(now) or max(map(int.__sub__, now, seen)) > MAX_SWITCHES_PER_SECOND * seconds:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    return wait


def waiting_job(folder: Path, *arguments: str, backend: str) -> subprocess.Popen[str]:
    """Start a job of three ranks, two of which wait for the last."""
    (folder / "script.py").write_text(SCRIPT)
    words = ("run", "-n", "3", "--backend", backend, "script.py", *arguments)
    job = start_rankless(*words, folder=folder, command=PATIENT_RANKLESS)
    try:
        wait_until(lambda: len(read_process_ids(folder)) == 3)
        wait_until(all_wait([read_process_ids(folder)[f"rank{rank}"] for rank in (0, 1)]))
    except BaseException:
        kill_job(job)
        raise
    return job


def ended_by(number: int, peer: str, folder: Path, *, backend: str, launcher_stands: float = 0) -> int:
    """The exit code of a job of three ranks, the last of which does not come, that is ended by a signal.

    `launcher_stands` are the seconds for which the launcher then stands still.
    """
    job = waiting_job(folder, "handler", peer, backend=backend)
    try:
        os.kill(job.pid, number)
        if launcher_stands:
            time.sleep(0.2)
            os.kill(job.pid, signal.SIGSTOP)
            time.sleep(launcher_stands)
            os.kill(job.pid, signal.SIGCONT)
        job.communicate(timeout=30)
        assert not any(is_alive(process_id) for process_id in read_process_ids(folder).values())
        return job.returncode
    finally:
        kill_job(job)


BACKENDS = ["gloo", "shared_memory"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("peer", ["deaf", pytest.param("stopped", marks=pytest.mark.exhaustive)])
def test_ctrl_c_lets_ranks_clean_up_that_wait_for_a_silent_rank(peer: str, backend: str, tmp_path: Path):
    assert ended_by(signal.SIGINT, peer, tmp_path, backend=backend) == 130
    assert notes(tmp_path) >= {"cleaned0", "cleaned1"}
    assert "cleaned2" not in notes(tmp_path) or peer == "stopped"


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.exhaustive), pytest.param("shared_memory")])
@pytest.mark.parametrize(
    "launcher_stands",
    [pytest.param(0, id="prompt"), pytest.param(GRACE_SECONDS + 0.2, id="held up", marks=pytest.mark.exhaustive)],
)
def test_a_sigterm_handler_runs_in_a_rank_that_waits_for_a_silent_rank(
    launcher_stands: float, backend: str, tmp_path: Path
):
    assert ended_by(signal.SIGTERM, "deaf", tmp_path, backend=backend, launcher_stands=launcher_stands) == 143
    assert notes(tmp_path) == {f"{name}{rank}" for name in ("handled", "raised", "cleaned") for rank in (0, 1)}


@pytest.mark.exhaustive
def test_the_grace_period_pauses_while_the_whole_host_is_frozen(tmp_path: Path):
    job = waiting_job(tmp_path, "deaf", "slow", backend="gloo")
    try:
        job.send_signal(signal.SIGINT)
        wait_until(lambda: notes(tmp_path) >= {"cleaning0", "cleaning1"})
        frozen = [job.pid, *sorted(descendants(job.pid))]
        for process_id in frozen:
            os.kill(process_id, signal.SIGSTOP)
        time.sleep(GRACE_SECONDS / 2 + 0.2)  # they had the other half before the connections were cut
        (tmp_path / "go_on").touch()
        for process_id in frozen:
            os.kill(process_id, signal.SIGCONT)
        job.communicate(timeout=30)
        assert job.returncode == 130
        assert notes(tmp_path) >= {"cleaned0", "cleaned1"}
    finally:
        kill_job(job)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["plain", pytest.param("handler", marks=pytest.mark.exhaustive)])
def test_after_the_loss_of_a_host_ranks_on_both_sides_raise_and_clean_up(way: str, hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    listed = ",".join(f"{address}:2" for address in hosts.addresses)
    line = [*PATIENT_RANKLESS, "run", "--hosts", listed, "--no-ssh", "--insecure", "script.py", way]
    jobs = [hosts.start(name, line, cwd=tmp_path) for name in ("a", "b")]
    wait_until(lambda: len(read_process_ids(tmp_path)) == 4)
    hosts.link("b", up=False)
    try:
        reports = [job.communicate(timeout=30)[1] for job in jobs]
    finally:
        hosts.link("b", up=True)
    assert f"host {hosts.addresses[1]} was lost: no heartbeat" in reports[0]
    wanted = {f"{name}{rank}" for name in ("raised", "cleaned") for rank in range(4)}
    assert notes(tmp_path) >= wanted, "\n".join(reports)
    assert not any(is_alive(process_id) for process_id in read_process_ids(tmp_path).values())
