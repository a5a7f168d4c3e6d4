"""The runs that `rankless verify` compares: recorded one after the other, read back, and checked to be whole."""

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rankless.launch import agent
from rankless.observe.recordings import Recording, read_recordings
from rankless.plan.check import make_run_plan
from rankless.plan.run_plan import Precision, Program, RunRequest

INTERRUPTED = 130


class TrialFailed(Exception):
    """Why runs cannot be compared: one failed, was interrupted, or recorded nothing."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A script that is run several times with the same seeds; the recordings go to folders in `folder`."""

    program: Program
    folder: str
    seed: int
    devices: str | None = None
    log_folder: str = "log"
    show: bool = False
    dtype: Precision | None = None
    """What all its runs compute in; None leaves it to the script."""

    def on_one(self) -> Recording:
        """The run on one worker. Raises `TrialFailed`, as all runs do."""
        return _recorded(self, "one", workers=1)[0]

    def on_many(self, workers: int) -> list[Recording]:
        """What every rank of the run on several workers recorded."""
        return _recorded(self, "many", workers=workers)

    def disturbed(self, repetitions: int) -> list[Recording]:
        """The run on one worker, repeated with its last bits disturbed, each time otherwise."""
        noise: list[Recording] = []
        for number in range(repetitions):
            noise += _recorded(self, f"noise{number}", workers=1, perturbation_seed=self.seed + number)
        return noise


def _recorded(trial: Trial, name: str, *, workers: int, perturbation_seed: int | None = None) -> list[Recording]:
    folder = os.path.join(trial.folder, name if trial.dtype is None else f"{name}-{trial.dtype}")
    plan = make_run_plan(
        trial.program,
        RunRequest(
            worker_count=workers,
            devices=trial.devices,
            seed=trial.seed,
            log_folder=trial.log_folder,
            progress=False,
            recording=os.path.abspath(folder),
            perturbation_seed=perturbation_seed,
            dtype=trial.dtype,
        ),
    )
    _remove_old(folder)
    what = f"{workers} worker{'s' if workers != 1 else ''}" + (", disturbed" if perturbation_seed is not None else "")
    what += f", {trial.dtype}" if trial.dtype is not None else ""
    started = time.monotonic()
    with ExitStack() as stack:
        words = io.StringIO()
        out = sys.stdout if trial.show else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        exit_code = agent.run(plan, on_record=lambda _record: None, out=out, err=sys.stderr if trial.show else words)
    if exit_code != 0:
        print(words.getvalue(), file=sys.stderr, end="")
        raise TrialFailed(f"the run on {what} failed with exit code {exit_code}", exit_code)
    print(f"  {what:30}{time.monotonic() - started:6.1f} s", flush=True)
    return _whole(read_recordings(folder, workers), what, single=workers == 1)


def _whole(recordings: Sequence[Recording | None], what: str, *, single: bool) -> list[Recording]:
    """The recordings, if each rank's is there to its end; a lone worker without any has called no job."""
    whole = []
    for rank, recording in enumerate(recordings):
        if recording is None and single:
            recording = Recording(rank=0, results=(), finished=True, steps=0, described=(), tensors={})
        if recording is None:
            raise TrialFailed(f"rank {rank} of the run on {what} called no job", 1)
        if not recording.finished:
            raise TrialFailed(f"rank {rank} of the run on {what} ended without leaving (os._exit?)", 1)
        whole.append(recording)
    return whole


def _remove_old(folder: str) -> None:
    """Recordings that an earlier run has left in the same place would be taken for this one's."""
    for pattern in ("rank*.results", "rank*.safetensors"):
        for file in Path(folder).glob(pattern):
            file.unlink()
