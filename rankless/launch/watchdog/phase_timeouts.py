"""The phases of a run: in each one, which process may wait for which, and after how long the watchdog reports it.

`PHASES` is the one table of them. The watchdog takes its limits and its words from it, and
docs/explanation/watchdog.md shows it. Every phase has an end: a process that waits for ever in it is reported within
the phase's time, and ends the run within `--hang-timeout`.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rankless.config.extensions import list_extensions
from rankless.records.worker_status import WorkerStatus

MIN_STALL_SECONDS = 10.0
"""The shortest pause between two steps that the watchdog reports."""
STARTUP_STALL_SECONDS = 30.0
"""The same before the first step: one rank may download or prepare data while the others wait."""
STEP_MULTIPLE = 20.0
"""A pause of so many median steps counts as a stall."""
PAUSE_MULTIPLE = 2.0
"""Pauses that ended on their own, such as an evaluation, are normal: a stall is so many times longer."""
HISTORY_LENGTH = 64


class StepRate:
    """Learns the usual step time from the steps that the workers count."""

    def __init__(self) -> None:
        self._per_step: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._pauses: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._count = 0
        self._last: float | None = None

    def update(self, pages: Sequence[WorkerStatus]) -> None:
        """Read the workers' counters. A step of any worker is progress."""
        latest = max((page for page in pages if page.last is not None), key=lambda page: page.last or 0.0, default=None)
        if latest is None or latest.last is None or (self._last is not None and latest.last <= self._last):
            return
        count = max(page.count for page in pages)
        if self._last is not None:
            seconds = latest.last - self._last
            self._per_step.append(seconds / max(1, count - self._count))
            self._pauses.append(seconds)
        self._count, self._last = count, latest.last

    def record_pause(self, seconds: float) -> None:
        """Record that the job paused for `seconds` and then continued on its own."""
        self._pauses.append(seconds)

    @property
    def steps(self) -> int:
        """Steps of the rank that has made the most."""
        return self._count

    @property
    def step_seconds(self) -> float | None:
        """The median time of a step; None before the second step."""
        # Not `statistics.median`: a user's module named `statistics` would shadow Python's.
        return sorted(self._per_step)[len(self._per_step) // 2] if self._per_step else None

    def seconds_since_step(self, now: float) -> float:
        """Seconds since the last step; infinity before the first."""
        return float("inf") if self._last is None else now - self._last

    @property
    def stall_limit(self) -> float:
        """The pause in seconds from which the job counts as stalled."""
        minimum = MIN_STALL_SECONDS if self._last is not None else STARTUP_STALL_SECONDS
        return max(minimum, STEP_MULTIPLE * (self.step_seconds or 0.0), PAUSE_MULTIPLE * max(self._pauses, default=0.0))


PhaseName = Literal[
    "start",
    "import",
    "joining",
    "data",
    "capture",
    "save",
    "once",
    "script",
    "end",
    "teardown",
]


@dataclass(frozen=True, kw_only=True)
class RunPhase:
    """A part of a run in which a process may stand still."""

    name: PhaseName
    title: str
    """For the table in the docs."""
    waits: str
    """Which process may wait there for which other one."""
    recognized_by: str
    least_seconds: float
    """The shortest pause that is reported if it ends in this phase."""
    doing: str = ""
    """What a rank does there, to follow "rank 1"; "" where the line of the script says it all."""
    files: tuple[str, ...] = ()
    """Parts of paths: a rank whose stack has a frame in such a file is in this phase."""


PHASES: tuple[RunPhase, ...] = (
    RunPhase(
        name="start",
        title="start of the workers",
        waits="the agent waits for the process that starts the workers and imports PyTorch and `--preload`",
        recognized_by="no process of the rank has started",
        least_seconds=STARTUP_STALL_SECONDS,
    ),
    RunPhase(
        name="import",
        title="imports of the script",
        waits="a rank waits for a file, a lock or the network; others wait for it in the rendezvous",
        recognized_by="the rank's stack is in Python's import system",
        least_seconds=STARTUP_STALL_SECONDS,
        doing="imports a module",
        files=("<frozen importlib._bootstrap>",),
    ),
    RunPhase(
        name="joining",
        title="joining",
        waits="ranks wait in a rendezvous for ranks that have not joined, or cannot connect",
        recognized_by="the rank's stack is in a rendezvous: `init_process_group`, `new_group`, a store, "
        "`rankless.init`, `hvd.init`",
        least_seconds=STARTUP_STALL_SECONDS,
        doing="joins",
        files=(
            "torch/distributed/rendezvous.py",
            "torch/distributed/elastic/rendezvous/",
            "torch/distributed/elastic/utils/store.py",
            "rankless/runtime/rendezvous/",
            "rankless/runtime/process_groups",
            "rankless/runtime/hooks/init_process_group",
        ),
    ),
    RunPhase(
        name="data",
        title="reading data",
        waits="a rank waits for the worker processes of its DataLoader; others wait for it in a collective",
        recognized_by="the rank's stack is in a DataLoader or in `rankless.loader`",
        least_seconds=MIN_STALL_SECONDS,
        doing="reads data",
        files=("torch/utils/data/", "rankless/data/"),
    ),
    RunPhase(
        name="capture",
        title="capture (compilation)",
        waits="a rank waits in the job's function, which is captured; others wait for its program",
        recognized_by="the rank's stack is in the compiler of Rankless or of PyTorch",
        least_seconds=STARTUP_STALL_SECONDS,
        doing="captures a job",
        files=("rankless/compiler/", "torch/_dynamo/", "torch/_inductor/"),
    ),
    RunPhase(
        name="save",
        title="saving and loading",
        waits="a rank waits for a disk or for the script's `state_dict`; others wait for it in a collective",
        recognized_by="the rank's stack is in `rankless.save`, `rankless.load`, `torch.save` or `torch.load`",
        least_seconds=STARTUP_STALL_SECONDS,
        doing="saves or loads",
        files=("rankless/checkpoint/", "torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/"),
    ),
    RunPhase(
        name="once",
        title="`rankless.once`",
        waits="rank 0 waits in the script's function; the others wait for its result",
        recognized_by="the rank's stack is in `rankless.once`",
        least_seconds=STARTUP_STALL_SECONDS,
        doing="calls a function once for all ranks",
        files=("rankless/context/once_for_all_ranks.py",),
    ),
    RunPhase(
        name="script",
        title="the script before the first step, between steps and between passes",
        waits="ranks wait in a collective or in a job's call for a rank that is elsewhere, or all ranks wait",
        recognized_by="none of the others",
        least_seconds=MIN_STALL_SECONDS,
    ),
    RunPhase(
        name="end",
        title="the end of the script",
        waits="a rank waits for a save in the background, for servers, or for the end of the other ranks",
        recognized_by="the script has returned, and the rank has not reported its end",
        least_seconds=STARTUP_STALL_SECONDS,
    ),
    RunPhase(
        name="teardown",
        title="teardown",
        waits="a process waits for its threads or in an `atexit` function; or the process that starts the workers "
        "does not take note of the end of a worker",
        recognized_by="the rank has reported the end of its script, and its process has not ended",
        least_seconds=STARTUP_STALL_SECONDS,
    ),
)
BY_NAME: Mapping[str, RunPhase] = {phase.name: phase for phase in PHASES}


@functools.cache
def extension_files(kind: Literal["waits", "joins"]) -> tuple[str, ...]:
    """Return the beginnings of the files of extensions in which ranks wait for others, or join them, with slashes."""
    return tuple(
        f"{extension.folder}/{file}" for extension in list_extensions() for file in getattr(extension.stacks, kind)
    )


def find_phase(files: Sequence[str], *, is_joining: bool, is_at_end: bool) -> PhaseName:
    """Return the phase of a rank whose script runs.

    Args:
        files: The files of libraries in its stack, with slashes, innermost frame first.
        is_joining: Whether it is in a call of a rendezvous.
        is_at_end: Whether the script itself has returned.
    """
    if is_joining:
        return "joining"
    joining = extension_files("joins")
    for file in files:
        if file.startswith(joining):
            return "joining"
        for phase in PHASES:
            if any(part in file for part in phase.files):
                return phase.name
    return "end" if is_at_end else "script"
