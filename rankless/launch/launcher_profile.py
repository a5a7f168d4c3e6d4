"""The launcher profile: everything in which a run under another launcher differs from a plain `rankless run`.

A program that was written for another launcher expects that launcher's environment variables, log files
and output. An extension with the launcher's name describes them. This module defines what such a
profile consists of and loads it by name. Nothing else in `launch` knows which launchers exist. It also makes
the log folder of a run, whose names the profile chooses.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from rankless.config.environment import python_path_at_start, user_visible_devices
from rankless.config.extensions import find_extension, import_declared
from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.config.run_config import AgreedJobConfig, AgreedProcesses, LauncherSpec, RunConfig
from rankless.errors import LaunchError
from rankless.launch.worker_output import FollowedFile, Source
from rankless.records.private_files import make_private_folder, private_opener

OutputHosts = Literal["first", "each", "gathered"]


class WorkerLogFiles(NamedTuple):
    """The files that one worker writes."""

    output: str
    error: str | None = None
    """The file for standard error; None if it goes to `output` too."""


class VisibleDevices(NamedTuple):
    """The devices of a host's workers."""

    names: list[str]
    """Each worker's torch device, numbered as the worker sees the GPUs."""
    cuda_variable: str | None = None
    """CUDA_VISIBLE_DEVICES of every worker; None leaves it unchanged."""


class SignalForwarding(NamedTuple):
    """The signals that the agent forwards unchanged to the workers before it ends the run."""

    numbers: tuple[int, ...]
    grace_seconds: float
    """The time that the workers have to end."""


class LauncherProfile:
    """What a launcher's programs and users expect. The defaults are those of a plain `rankless run`."""

    stop_grace_seconds: float | None = None
    """How long workers have to end after a signal to an agent; None takes the run's own grace."""
    elastic_driver: str = ""
    """The module whose `run_elastic(config, elastic, context)` runs elastic jobs, with its `DriverContext`."""
    output_hosts: OutputHosts = "first"
    """Where the terminal shows workers: of host 0 on host 0, of each host on itself, or of all hosts on host 0."""
    withholds_tracebacks: bool = True
    """Whether the terminal leaves out the tracebacks of workers, except that of the rank that failed first."""
    shows_summary: bool = True
    """Whether the log folder gets a summary of the run, and the terminal a line of it."""
    has_private_logs: bool = True
    """Whether other users may not read the workers' logs. Launchers with logs of the umask's modes keep them."""
    exports_environment: bool = False
    """Whether other hosts get the whole environment, instead of only what torch, its libraries and Python read."""
    uses_rankless_api: bool = True
    """Whether advice to the user may name functions of `rankless`."""
    plain_process_option: str | None = "--no-warm"
    """The option that starts plain processes instead of forks; None if the launcher has none."""

    @property
    def run_name(self) -> str | None:
        """The first part of the name of the run's log folder; None takes the time of the start."""
        return None

    @property
    def signal_forwarding(self) -> SignalForwarding | None:
        """None: the agent sends SIGINT or SIGTERM, with its own grace periods."""
        return None

    def folder_name(self, run_id: str, host_index: int) -> str:
        """Return the name of a host's folder of log files."""
        return run_id

    def log_files(self, folder: str, rank: int, local_rank: int) -> WorkerLogFiles:
        """Return the paths of a worker's log files, with those in the run's folder under `folder`."""
        return WorkerLogFiles(os.path.join(folder, f"rank{rank}.log"))

    def process_log_file(self, folder: str, role: str, index: int) -> str:
        """Return the path of the log file of a process beside the workers, such as number 1 of the role "server"."""
        return os.path.join(folder, f"{role}{index}.log")

    def link_logs(
        self, folder: str, ranks: Sequence[int], start: AgreedJobConfig, *, processes: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Link the log files of this host's `ranks` to where the launcher's users look for those of the latest run.

        So it does with those of this host's `processes` beside the workers, by role and number.
        """
        return

    def shown_streams(self, config: RunConfig, folder: str, workers: Sequence[WorkerConfig]) -> list[FollowedFile]:
        """Return the parts of the workers' output that the terminal shows, with their prefixes."""
        if config.request.show == "first":
            return [FollowedFile(path=worker.log_file) for worker in workers[:1]]
        return [FollowedFile(path=worker.log_file, prefix=f"[{worker.rank}] ") for worker in workers]

    def visible_devices(self, devices: Sequence[str]) -> VisibleDevices:
        """Return the devices as the workers see them. `devices` has one torch device per worker of this host."""
        # In the requested order: local rank 0's GPU is the first that a script sees.
        return show_gpus(devices, list(dict.fromkeys(_gpu(device) for device in devices if device != "cpu")))

    def worker_environment(
        self,
        worker: WorkerConfig,
        start: AgreedJobConfig,
        *,
        elastic_host: str | None = None,
    ) -> Mapping[str, str | None]:
        """Return the variables to set (or, where None, to remove) after RANK and its kin and `open_services`'s.

        In an elastic job `elastic_host` is the name of the worker's host, and the worker's rank is not known yet.
        """
        return {"PYTHONPATH": python_path_at_start()}

    def process_environment(
        self, processes: AgreedProcesses, index: int, start: AgreedJobConfig
    ) -> Mapping[str, str | None]:
        """Return the variables to set (or, where None, to remove) for one of the processes of a role."""
        return {}

    @contextlib.contextmanager
    def open_services(
        self,
        config: RunConfig,
        *,
        addresses: Sequence[str],
        worker_counts: Sequence[int],
        store_address: str,
    ) -> Iterator[Mapping[str, str | None]]:
        """Hold ports and run servers on host 0 while the job runs; yield their variables for all workers.

        `addresses` and `worker_counts` have one item per host. `store_address` is an address of host 0 that all reach.
        """
        yield {}

    def opening_text(
        self, config: RunConfig, lead: WorkerLaunch, start: AgreedJobConfig, *, folder: str, first_host: str
    ) -> str | None:
        """Return what this host's terminal shows at the start instead of Rankless's table, or None.

        `lead` is this host's first worker, `folder` its folder of log files, `first_host` the name of host 0.
        """
        return None

    def failure_note(self, rank: int, exit_code: int) -> str:
        """Return what follows the report of a failed rank."""
        return ""


def load_profile(launcher: LauncherSpec | None) -> LauncherProfile:
    """Return the profile of a run. Raises `LaunchError` for a launcher that this Rankless does not have."""
    if launcher is None:
        return LauncherProfile()
    # The name may come from another host: it must not reach any module but a launcher's profile.
    extension = find_extension(launcher.name)
    if extension is None or not extension.launcher:
        raise LaunchError(
            expected="a launcher that this Rankless has",
            found=repr(launcher.name),
            fix="install the same version of Rankless on all hosts",
        )
    make = import_declared(launcher.name, "launcher", extension.launcher, name="make_profile")
    profile: LauncherProfile = make(launcher.settings)
    return profile


def show_gpus(devices: Sequence[str], gpus: Sequence[int]) -> VisibleDevices:
    """Let workers see only `gpus`, numbered from 0, so that a script may use LOCAL_RANK as a device number."""
    visible = user_visible_devices()
    names = [visible[number] if visible is not None else str(number) for number in gpus]
    seen = [device if device == "cpu" else f"cuda:{gpus.index(_gpu(device))}" for device in devices]
    return VisibleDevices(seen, ",".join(names) if names else None)


def log_file_of(worker: WorkerConfig, source: Source) -> str:
    """Return the path of the file that gets one of a worker's two output streams."""
    return worker.log_file if source == "out" else worker.error_log_file or worker.log_file


def _gpu(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def make_run_id(profile: LauncherProfile) -> str:
    """Return a name that no other run has: the launcher's name for the run or the time, and a random part."""
    name = re.sub(r"[^\w.-]", "_", profile.run_name) if profile.run_name else time.strftime("%Y%m%d-%H%M%S")
    return f"{name}-{secrets.token_hex(3)}"


def run_folder(config: RunConfig, profile: LauncherProfile, run_id: str, host_index: int) -> str:
    """Return the folder of a host's log files of a run."""
    return os.path.join(config.request.log_folder, profile.folder_name(run_id, host_index))


def make_run_folder(config: RunConfig, profile: LauncherProfile, start: AgreedJobConfig, host_index: int) -> str:
    """Make the folder of a run's log files and point the link `latest` beside it to it; return its path."""
    first = start.first_rank(host_index)
    folder = run_folder(config, profile, start.run_id, host_index)
    try:
        may_exist = config.cluster is not None  # hosts may share a disk
        if profile.has_private_logs:
            make_private_folder(folder, may_exist=may_exist)
        else:
            os.makedirs(folder, exist_ok=may_exist)
        for local_rank in range(config.worker_count):
            make_log_files(profile, profile.log_files(folder, first + local_rank, local_rank))
        link = os.path.join(config.request.log_folder, f".latest-{start.run_id}-{secrets.token_hex(3)}")
        os.symlink(os.path.basename(folder), link)
        os.replace(link, os.path.join(config.request.log_folder, "latest"))
        ranks = range(first, first + start.workers[host_index])
        profile.link_logs(folder, ranks, start, processes=start.list_processes(host_index))
    except OSError as error:
        raise LaunchError(
            expected=f"a folder for log files, {folder}",
            found=error.strerror,
            fix="name another folder with --log-dir",
        ) from error
    return folder


def make_log_files(profile: LauncherProfile, files: WorkerLogFiles) -> None:
    """Make a worker's log files and their folder. Where there are two, files of an earlier run become empty."""
    os.makedirs(os.path.dirname(files.output), exist_ok=True)
    for path in filter(None, files):
        open(
            path, "ab" if files.error is None else "wb", opener=private_opener if profile.has_private_logs else None
        ).close()
