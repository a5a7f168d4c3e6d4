"""The log folder of a run, and the files that workers write there."""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence

from rankless.config.horovodrun import padded_rank
from rankless.config.run_config import JobStart, RunConfig
from rankless.config.worker_config import WorkerConfig
from rankless.errors import LaunchError
from rankless.launch.worker_output import SOURCES, Source, Stream

_FIRST_ATTEMPT = "attempt_0"
"""torchrun's folder of logs until it first restarts the workers, as is not done here."""
FLEET_LOG = "workerlog.{}"
"""Paddle's name for the log file of a rank, which its users look for right in the log folder."""


def run_name(config: RunConfig) -> str:
    """A name that no other run has."""
    name = time.strftime("%Y%m%d-%H%M%S")
    wanted = (
        config.foreign.run_id
        if config.foreign is not None
        else config.fleet.job_id
        if config.fleet is not None
        else None
    )
    if wanted:
        name = re.sub(r"[^\w.-]", "_", wanted)
    return f"{name}-{secrets.token_hex(3)}"


def run_folder(config: RunConfig, name: str, place: int) -> str:
    """Where a host's log files of a run go; torchrun numbers them on each host from 0, and hosts may share a disk."""
    own = f"-host{place}" if config.foreign is not None and place else ""
    return os.path.join(config.log_folder, name + own)


def make_run_folder(config: RunConfig, start: JobStart, place: int) -> str:
    """A new folder for one run, to which `latest` beside it points from now on."""
    name, first = start.run_id, start.first_rank(place)
    folder = run_folder(config, name, place)
    try:
        os.makedirs(folder, exist_ok=config.cluster is not None)  # hosts may share a disk
        if config.foreign is not None or config.horovod is not None:
            for local_rank in range(config.worker_count):
                make_pair(log_files(config, folder, first + local_rank, local_rank))
        link = os.path.join(config.log_folder, f".latest-{name}-{secrets.token_hex(3)}")
        os.symlink(os.path.basename(folder), link)
        os.replace(link, os.path.join(config.log_folder, "latest"))
        if config.fleet is not None:
            _link_fleet_logs(config.log_folder, folder, start, range(first, first + start.workers[place]))
    except OSError as error:
        raise LaunchError(
            expected=f"a folder for log files, {folder}",
            found=error.strerror,
            fix="name another folder with --log-dir",
        ) from error
    return folder


def make_pair(paths: tuple[str, str | None]) -> None:
    """A folder for a worker's two files, which are empty at first, as those of a run before may not be."""
    os.makedirs(os.path.dirname(paths[0]), exist_ok=True)
    for path in filter(None, paths):
        open(path, "wb").close()


def _link_fleet_logs(log_folder: str, folder: str, start: JobStart, ranks: Iterable[int]) -> None:
    """Let `workerlog.N` beside the run's folder be this run's; those of a larger run before it go."""
    for rank in ranks:
        path = os.path.join(log_folder, FLEET_LOG.format(rank))
        if os.path.isfile(path) and not os.path.islink(path):
            os.replace(path, path + ".old")  # Paddle's own: it is the user's
        link = os.path.join(log_folder, f".{FLEET_LOG.format(rank)}-{secrets.token_hex(3)}")
        os.symlink(os.path.join(os.path.basename(folder), FLEET_LOG.format(rank)), link)
        os.replace(link, path)
    for name in os.listdir(log_folder):
        path, number = os.path.join(log_folder, name), name.removeprefix(FLEET_LOG.format(""))
        if os.path.islink(path) and number.isdigit() and int(number) >= start.world_size:
            with contextlib.suppress(FileNotFoundError):  # another host on the same disk was faster
                os.unlink(path)


def log_files(config: RunConfig, folder: str, rank: int, local_rank: int) -> tuple[str, str | None]:
    """Where a worker's output goes, and its standard error if that has a file of its own, as other launchers do it."""
    if config.horovod is not None:
        own = os.path.join(config.horovod.output_folder or folder, f"rank.{padded_rank(config.horovod, rank)}")
        return os.path.join(own, "stdout"), os.path.join(own, "stderr")
    if config.foreign is None:
        return os.path.join(folder, (FLEET_LOG if config.fleet is not None else "rank{}.log").format(rank)), None
    own = os.path.join(folder, _FIRST_ATTEMPT, str(local_rank))
    return os.path.join(own, "stdout.log"), os.path.join(own, "stderr.log")


def shown_streams(config: RunConfig, folder: str, workers: Sequence[WorkerConfig]) -> list[Stream]:
    """What the terminal shows of the files."""
    if config.horovod is not None:
        timed = config.horovod.timestamps
        return [
            Stream(path=_file(each, source), sink=source, prefix=f"[{each.rank}]<std{source}>:", timed=timed)
            for each in workers
            for source in SOURCES
        ]
    if config.foreign is None:
        is_alone = config.show == "first"
        shown = workers[:1] if is_alone else workers
        return [Stream(path=each.log_file, prefix=None if is_alone else f"[{each.rank}] ") for each in shown]
    names: dict[Source, str] = {"out": "stdout", "err": "stderr"}
    return [
        Stream(
            path=_file(workers[stream.rank], stream.source),
            sink=stream.source,
            prefix=stream.prefix,
            needles=stream.needles,
            copy=os.path.join(folder, _FIRST_ATTEMPT, f"filtered_{names[stream.source]}.log")
            if stream.needles
            else None,
        )
        for stream in config.foreign.streams
    ]


def _file(worker: WorkerConfig, source: Source) -> str:
    return worker.log_file if source == "out" else worker.error_log_file or worker.log_file
