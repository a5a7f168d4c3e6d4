"""The log folder of a run, and the files that its workers write."""

import os
import re
import secrets
import time

from rankless.config.run_config import AgreedJobConfig, RunConfig
from rankless.errors import LaunchError
from rankless.launch.profile import LauncherProfile, WorkerLogFiles
from rankless.records.private_files import make_private_folder, private_opener


def make_run_id(profile: LauncherProfile) -> str:
    """Return a name that no other run has: the launcher's name for the run or the time, and a random part."""
    name = re.sub(r"[^\w.-]", "_", profile.run_name) if profile.run_name else time.strftime("%Y%m%d-%H%M%S")
    return f"{name}-{secrets.token_hex(3)}"


def run_folder(config: RunConfig, profile: LauncherProfile, run_id: str, host_index: int) -> str:
    """Return the folder of a host's log files of a run."""
    return os.path.join(config.log_folder, profile.folder_name(run_id, host_index))


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
        link = os.path.join(config.log_folder, f".latest-{start.run_id}-{secrets.token_hex(3)}")
        os.symlink(os.path.basename(folder), link)
        os.replace(link, os.path.join(config.log_folder, "latest"))
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
