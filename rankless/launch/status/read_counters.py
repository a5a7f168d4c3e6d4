"""One reading of a run in progress: the counters of its processes, from shared memory and from `/proc`.

A reading asks a thread of each worker for the place of the main thread, as the watchdog does. It sends no signal. A
worker whose thread does not answer at once, because C code keeps the interpreter's lock, has no place.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.launch.watchdog.process_activity import ProcessStats, read_process_stats
from rankless.launch.watchdog.stack_classifier import StackLocation, classify_stack
from rankless.launch.watchdog.stacks import ask_thread, parse_main_stack
from rankless.records.live_run import LiveRun, LiveWorker, ProcessRow
from rankless.records.server_traffic_counters import SERVER_PAGE_NAME, ServerActivity
from rankless.records.shared_record import read_record, read_sequence
from rankless.records.worker_status import (
    NAME,
    PLACE_BYTES,
    PLACE_REQUEST,
    PLACE_START,
    WorkerStatus,
    read_page,
)

PLACE_SECONDS = 0.3
"""How long all workers together may take to say where they are."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class ProcessReading:
    """What `/proc` has of a process."""

    stats: ProcessStats
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkerReading:
    """A worker of this host at one moment."""

    page: WorkerStatus | None
    """None if it cannot be read."""
    process: ProcessReading | None
    """None if the process is gone."""
    location: StackLocation
    """Empty if it is not known."""


@dataclass(frozen=True, kw_only=True)
class RoleProcessReading:
    """A process of this host beside its workers, at one moment."""

    activity: ServerActivity | None
    """None if it has published nothing."""
    process: ProcessReading | None


@dataclass(frozen=True, kw_only=True)
class RunReading:
    """All processes of a run on this host at one moment."""

    run: LiveRun
    monotonic: float
    workers: Mapping[int, WorkerReading]
    """By rank, those of this host that have started and not ended."""
    processes: Mapping[tuple[str, int], RoleProcessReading]
    """By role and number."""


def read_run(run: LiveRun, *, with_places: bool) -> RunReading:
    """Read the present state of a run.

    Args:
        run: The run.
        with_places: Whether to ask where each worker is. That takes up to `PLACE_SECONDS`.
    """
    own = [worker for worker in run.workers if worker.host == run.host and worker.exit_code is None]
    started = [worker for worker in own if worker.process_id is not None]
    with contextlib.ExitStack() as stack:
        pages = {worker.rank: stack.enter_context(_opened(run, worker.page, NAME)) for worker in started}
        places = _read_places({each.rank: (each, pages[each.rank]) for each in started}) if with_places else {}
        return RunReading(
            run=run,
            monotonic=time.monotonic(),
            workers={each.rank: _read_worker(each, pages[each.rank], places.get(each.rank, "")) for each in started},
            processes={(each.role, each.index): _read_role_process(run, each) for each in run.processes},
        )


def read_process(process_id: int) -> ProcessReading | None:
    """Return what `/proc` has of a process; None if it is gone."""
    stats = read_process_stats(process_id)
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return None if stats is None else ProcessReading(stats=stats, memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"))


def _read_worker(worker: LiveWorker, page: int | None, place: str) -> WorkerReading:
    status = None if page is None else read_page(page)
    location = StackLocation()
    if place and status is not None:
        location = classify_stack(parse_main_stack(place, status.main_thread))
    return WorkerReading(page=status, process=read_process(worker.process_id or 0), location=location)


def _read_places(workers: Mapping[int, tuple[LiveWorker, int | None]]) -> dict[int, str]:
    """Return the stack of the main thread of each worker that answers in time."""
    waiting: dict[int, tuple[int, int]] = {}
    for rank, (worker, page) in workers.items():
        stats = read_process_stats(worker.process_id or 0)
        if page is None or stats is None or stats.state in "tTZX":
            continue
        before = read_sequence(page, offset=PLACE_START)
        if ask_thread(worker.process_id or 0, read_page(page), PLACE_REQUEST):
            waiting[rank] = page, before
    places = {}
    deadline = time.monotonic() + PLACE_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, (page, before) in list(waiting.items()):
            if read_sequence(page, offset=PLACE_START) >= before + 2:
                record = read_record(page, offset=PLACE_START, size=PLACE_BYTES)
                places[rank] = "" if record is None else record.data.decode(errors="replace")
                del waiting[rank]
    return places


def _read_role_process(run: LiveRun, process: ProcessRow) -> RoleProcessReading:
    activity = None
    with _opened(run, process.status_descriptor, SERVER_PAGE_NAME) as page:
        record = None if page is None else read_record(page)
    if record is not None:
        with contextlib.suppress(msgspec.DecodeError):
            activity = msgspec.json.decode(record.data, type=ServerActivity)
    return RoleProcessReading(activity=activity, process=read_process(process.process_id))


@contextlib.contextmanager
def _opened(run: LiveRun, descriptor: int | None, name: str) -> Iterator[int | None]:
    """Yield a descriptor of a shared file that the agent has open; None if it has it no more."""
    own = None if descriptor is None else open_shared_file_of(run.process_id, descriptor, name)
    try:
        yield own
    finally:
        if own is not None:
            os.close(own)


def open_shared_file_of(process_id: int, descriptor: int, name: str) -> int | None:
    """Return a descriptor of a shared file of another process; None if that has no such file there, or not any more.

    Args:
        process_id: The process.
        descriptor: Its descriptor of the file.
        name: A part of the file's name.
    """
    path = f"/proc/{process_id}/fd/{descriptor}"
    try:
        if name not in os.readlink(path):
            return None
        own = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        is_right = name in os.readlink(f"/proc/self/fd/{own}")
    except OSError:
        is_right = False
    if not is_right:
        os.close(own)
    return own if is_right else None
