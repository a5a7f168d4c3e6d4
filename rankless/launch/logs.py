"""The log folder of a run, and the files that workers write there."""

import os
import re
import secrets
import time
from collections.abc import Sequence

from rankless.errors import LaunchError
from rankless.launch.terminal import Stream
from rankless.plan.foreign import Source
from rankless.plan.run_plan import RunPlan, WorkerPlan

_FIRST_ATTEMPT = "attempt_0"
"""torchrun's folder of logs until it first restarts the workers, as is not done here."""


def make_run_folder(plan: RunPlan) -> str:
    """A new folder for one run, to which `latest` beside it points from now on."""
    name = time.strftime("%Y%m%d-%H%M%S")
    if plan.foreign is not None and plan.foreign.run_id:
        name = re.sub(r"[^\w.-]", "_", plan.foreign.run_id)
    name = f"{name}-{secrets.token_hex(3)}"
    folder = os.path.join(plan.log_folder, name)
    try:
        os.makedirs(folder)
        if plan.foreign is not None:
            for rank in range(plan.worker_count):
                os.makedirs(os.path.dirname(log_files(plan, folder, rank)[0]))
        link = os.path.join(plan.log_folder, f".latest-{name}")
        os.symlink(name, link)
        os.replace(link, os.path.join(plan.log_folder, "latest"))
    except OSError as error:
        raise LaunchError(
            expected=f"a folder for log files, {folder}",
            found=error.strerror,
            fix="name another folder with --log-dir",
        ) from error
    return folder


def log_files(plan: RunPlan, folder: str, rank: int) -> tuple[str, str | None]:
    """Where a worker's output goes, and its standard error if that has a file of its own, as torchrun lays them out."""
    if plan.foreign is None:
        return os.path.join(folder, f"rank{rank}.log"), None
    own = os.path.join(folder, _FIRST_ATTEMPT, str(rank))
    return os.path.join(own, "stdout.log"), os.path.join(own, "stderr.log")


def shown_streams(plan: RunPlan, folder: str, workers: Sequence[WorkerPlan]) -> list[Stream]:
    """What the terminal shows of the files."""
    if plan.foreign is None:
        is_alone = plan.show == "first"
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
        for stream in plan.foreign.streams
    ]


def _file(worker: WorkerPlan, source: Source) -> str:
    return worker.log_file if source == "out" else worker.error_log_file or worker.log_file
