"""Publishes what `rankless status` needs to know about a run, in a file in memory that only the agent has open."""

import datetime
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from rankless.config.run_config import RunConfig
from rankless.launch.prepare_run import ReadyJob
from rankless.records.encoding import encode_json
from rankless.records.events import AnyRecord, Exited, HostLost, ScriptFinished, SlowRankChanged, Started
from rankless.records.live_run import LAYOUT, LIVE_RUN_NAME, LiveRun, LiveWorker, ProcessRow
from rankless.records.shared_record import RecordWriter, open_shared_file

_FIXED_BYTES = 1 << 16
_PROCESS_BYTES = 1 << 12


class LiveRunPage:
    """The record of one run, which vanishes with this process. Outside Linux there is none.

    Args:
        size: The most bytes of the record, as `measure_live_run` returns.
    """

    def __init__(self, size: int) -> None:
        self.descriptor = open_shared_file(LIVE_RUN_NAME, size)
        self._writer: RecordWriter | None = None
        if self.descriptor is not None:
            self._writer = RecordWriter(memoryview(mmap.mmap(self.descriptor, size)))
        self._run: LiveRun | None = None
        self._has_changed = False

    def begin(self, run: LiveRun) -> None:
        """Publish a run."""
        self._run, self._has_changed = run, True
        self.publish()

    def receive(self, record: AnyRecord) -> None:
        """Take note of the start and the end of a worker and of its script, also on another host, of lost hosts, and
        of slow ranks.
        """
        if self._run is not None and isinstance(record, HostLost) and record.is_covered:
            self._run = msgspec.structs.replace(self._run, lost_hosts=(*self._run.lost_hosts, record.host))
            self._has_changed = True
        if self._run is not None and isinstance(record, SlowRankChanged):
            others = [each for each in self._run.slow_ranks if each.rank != record.rank]
            slow = others if record.is_over else [*others, record.slow]
            self._run = msgspec.structs.replace(self._run, slow_ranks=tuple(slow))
            self._has_changed = True
        if self._run is None or not isinstance(record, Started | ScriptFinished | Exited):
            return
        workers = list(self._run.workers)
        if not 0 <= record.rank < len(workers):
            return
        if isinstance(record, Started):
            changed = msgspec.structs.replace(workers[record.rank], process_id=record.pid, exit_code=None)
        elif isinstance(record, ScriptFinished):
            changed = msgspec.structs.replace(workers[record.rank], has_finished=True)
        else:
            changed = msgspec.structs.replace(workers[record.rank], exit_code=record.exit_code)
            left = tuple(each for each in self._run.slow_ranks if each.rank != record.rank)
            self._run = msgspec.structs.replace(self._run, slow_ranks=left)
        workers[record.rank] = changed
        self._run = msgspec.structs.replace(self._run, workers=tuple(workers))
        self._has_changed = True

    def set_processes(self, rows: Sequence[ProcessRow]) -> None:
        """Note what the processes beside the workers are now."""
        processes = tuple(msgspec.structs.replace(row, log_file=os.path.abspath(row.log_file)) for row in rows)
        if self._run is not None and processes != self._run.processes:
            self._run = msgspec.structs.replace(self._run, processes=processes)
            self._has_changed = True

    def publish(self) -> None:
        """Write the record, if it has changed since the last call."""
        if self._has_changed and self._writer is not None and self._run is not None:
            with suppress(UnicodeEncodeError):  # an argument or a path is no text: the run continues without a record
                data = encode_json(self._run)
                if len(data) <= self._writer.capacity:
                    self._writer.write(data)
        self._has_changed = False

    def close(self) -> None:
        """Remove the record."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = self._writer = None


def measure_live_run(config: RunConfig, job: ReadyJob, *, folder: str) -> int:
    """Return the most bytes of a run's record. The system gives memory only for those that are written."""
    path_bytes = len(os.path.abspath(folder)) * 6  # of a character in JSON
    program_bytes = 6 * sum(map(len, (config.program.text, *config.program.arguments, *job.names)))
    process_count = sum(len(each.addresses) for each in job.start.roles.values())
    workers = job.start.world_size * (640 + path_bytes)
    return (_FIXED_BYTES + program_bytes + workers + process_count * (_PROCESS_BYTES + path_bytes)) // 8 * 8


def make_live_run(
    config: RunConfig, job: ReadyJob, *, folder: str, pages: Sequence[int], log_file: Callable[[int], str]
) -> LiveRun:
    """Return the record of a run that starts now.

    Args:
        config: What is run.
        job: The run's hosts.
        folder: The folder of its log files on this host.
        pages: The descriptors of the status pages of this host's workers.
        log_file: Returns the log file of a rank.
    """
    start, first = job.start, job.start.first_rank(job.host_index)
    own_pages = dict(zip(range(first, first + len(pages)), pages, strict=True))
    hosts = [host for host, count in enumerate(start.workers) for _ in range(count)]
    devices = dict(enumerate(device for row in job.devices for device in row))
    if job.host_index > 0:
        devices = dict(enumerate(config.devices, start=first))
    return LiveRun(
        layout=LAYOUT,
        process_id=os.getpid(),
        run_id=start.run_id,
        log_folder=os.path.abspath(folder),
        script=config.program.text,
        arguments=tuple(config.program.arguments),
        seed=start.seed,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        started_monotonic=time.monotonic(),
        host=job.host_index,
        host_names=tuple(job.names) if len(start.workers) > 1 else ("",),
        process_counts={each.role: len(each.addresses) for each in job.start.roles.values()},
        workers=tuple(
            LiveWorker(
                rank=rank,
                host=host,
                device=devices.get(rank, ""),
                log_file=os.path.abspath(log_file(rank)),
                page=own_pages.get(rank),
            )
            for rank, host in enumerate(hosts)
        ),
    )
