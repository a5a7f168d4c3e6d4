"""The runs that `rankless verify` compares: run one after the other, recorded, and checked to be complete."""

import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import (
    Cluster,
    InspectedCall,
    PlanFile,
    Precision,
    Program,
    RunConfig,
    RunObservation,
    RunRequest,
)
from rankless.records.job_programs import ProgramRecord, read_program_records
from rankless.records.parallel_plan import PlannedAxis, ZeroLevel
from rankless.records.verify_recording_format import ComputedValue, read_values
from rankless.verify.comparison_with_reference_script import ReferenceRun
from rankless.verify.first_differing_value import FirstDifferingValue, find_first_value
from rankless.verify.read_and_combine_recordings import Recording, combine_losses, read_recordings

INTERRUPTED = 130

RunJob = Callable[[RunConfig, TextIO, TextIO], int]
"""Runs a job with its output on two streams, and returns its exit code; see `launch.agent.make_job_runner`."""


class RunFailed(Exception):
    """Runs cannot be compared: one failed, was interrupted, or recorded nothing. `next_step` says what to do."""

    def __init__(
        self, text: str, exit_code: int, *, next_step: str = "correct the error that is printed above"
    ) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.next_step = next_step


@dataclass(frozen=True, kw_only=True)
class VerifyRuns:
    """A script that runs several times with the same seeds. Recordings go to subfolders of `folder`."""

    program: Program
    folder: str
    seed: int
    run_job: RunJob
    devices: str | None = None
    backend: str | None = None
    """The backend of the process group of the runs on several workers; None leaves it to the devices."""
    cluster: Cluster | None = None
    """The hosts of the runs on several workers; None for this host alone."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The options of extensions of the runs on several workers; the run on one worker has none."""
    log_folder: str = "log"
    show: bool = False
    plan: PlanFile | None = None
    """The parallel plan of the runs on several workers; None lets each job make its own."""
    mesh: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh of the runs on several workers; none for one axis `data`."""
    heterogeneous_workers: int = 0
    """How many of several workers are heterogeneous."""
    dtype: Precision | None = None
    """The precision of all runs; None leaves it to the script."""
    steps: int | None = None
    """Stop each run after this number of training steps; None leaves it to the script."""
    inspected: InspectedCall | None = None
    """A job call of which all runs record every value."""
    is_foreign: bool = False
    """Whether the script calls no job, and is recorded from outside on every rank."""
    is_logical: bool = False
    """Whether several workers run the script in the logical view."""
    zero: ZeroLevel | None = None
    """The training state that several workers shard in the logical view."""
    against: str | None = None
    """A plain reference script that takes the same arguments, or None."""

    def run_one(self, limit: int | None = None) -> Recording:
        """Run on one worker, for at most `limit` steps. Raises `RunFailed`, as all runs do."""
        limits = [steps for steps in (limit, self.steps) if steps is not None]
        return replace(self, steps=min(limits, default=None))._record("one", workers=1)[0]

    def run_many(self, workers: int) -> list[Recording]:
        """Run on several workers, and return every rank's recording."""
        recordings = self._record("many", workers=workers)
        # In the logical view every rank has the loss of the whole batch.
        return combine_losses(recordings) if self.is_foreign and not self.is_logical else recordings

    def run_perturbed(self, repetitions: int, *, first: int = 0) -> list[Recording]:
        """Repeat the run on one worker with perturbed last bits, each time with another seed, numbered from `first`."""
        noise: list[Recording] = []
        for number in range(first, first + repetitions):
            noise += self._record(f"noise{number}", workers=1, perturbation_seed=self.seed + number)
        return noise

    def run_reference(self) -> ReferenceRun | None:
        """Run the reference script on one worker, if there is one."""
        if self.against is None:
            return None
        program = Program(kind="script", target=self.against, arguments=self.program.arguments)
        (recording,) = replace(self, program=program, is_foreign=False)._record("reference", workers=1)
        if not recording.steps:
            raise RunFailed(
                f"{self.against} made no optimizer step: there is nothing to compare",
                1,
                next_step="name a plain PyTorch script that trains, with the same arguments",
            )
        return ReferenceRun(name=os.path.basename(self.against), recording=recording)

    def read_programs(self) -> list[ProgramRecord]:
        """Return the programs of the jobs in the run on several workers."""
        return list(read_program_records(self._folder("many")))

    def find_first_value(
        self, call: InspectedCall, *, workers: int, step: int, tolerance: float | None = None
    ) -> FirstDifferingValue | None:
        """Return the first value of a job call that differs on `workers` workers.

        The runs stop after training step `step`. Returns None if the call was not made again, or could not be
        captured.
        """
        inspected = replace(self, inspected=call, steps=step)
        inspected.run_one()
        inspected.run_many(workers)
        inspected.run_perturbed(1)
        (one,), many, (noise,) = (
            inspected.read_inspected_values("one"),
            inspected.read_inspected_values("many", workers),
            inspected.read_inspected_values("noise0"),
        )
        return find_first_value(one, many, noise, call=call, tolerance=tolerance)

    def read_inspected_values(
        self, run: Literal["one", "many", "noise0"], workers: int = 1
    ) -> list[list[ComputedValue]]:
        """Return what each rank of a run recorded of the inspected call."""
        return [list(read_values(self._folder(run), rank)) for rank in range(workers)]

    def _folder(self, name: str) -> str:
        endings = ["" if self.dtype is None else f"-{self.dtype}", "" if self.inspected is None else "-values"]
        return os.path.abspath(os.path.join(self.folder, name + "".join(endings)))

    def _record(self, name: str, *, workers: int, perturbation_seed: int | None = None) -> list[Recording]:
        folder = self._folder(name)
        observation = RunObservation(
            stop_after_steps=self.steps,
            programs=folder if name == "many" else None,
            inputs=name == "one" and self.against is not None,
            inspected=self.inspected,
            is_reference=name == "reference",
            is_foreign=self.is_foreign,
        )
        config = make_run_config(
            self.program,
            RunRequest(
                worker_count=workers,
                devices=self.devices,
                backend=self.backend if workers > 1 else None,
                seed=self.seed,
                log_folder=self.log_folder,
                progress=False,
                recording=folder,
                perturbation_seed=perturbation_seed,
                dtype=self.dtype,
                plan=None if workers == 1 else self.plan,
                mesh=() if workers == 1 else self.mesh,
                observation=observation,
                view="logical" if self.is_logical and workers > 1 else "separate",
                zero=self.zero if workers > 1 else None,
                cluster=self.cluster if workers > 1 else None,
                options=self.options if workers > 1 else {},
                heterogeneous_workers=self.heterogeneous_workers if workers > 1 else 0,
            ),
        )
        what = _describe_run(config)
        _remove_recordings(folder)
        run_silently(config, what, show=self.show, run_job=self.run_job)
        return _require_complete(read_recordings(folder, workers), what, single=workers == 1)


def _describe_run(config: RunConfig) -> str:
    """Describe a run in a few words."""
    words = [f"{config.worker_count} worker{'s' if config.worker_count != 1 else ''}"]
    if config.cluster is not None:
        words = [f"{sum(host.workers for host in config.cluster.hosts)} workers on {len(config.cluster.hosts)} hosts"]
    words += ["perturbed"] if config.request.perturbation_seed is not None else []
    words += [config.request.dtype] if config.request.dtype is not None else []
    words += [os.path.basename(config.program.target)] if config.request.observation.is_reference else []
    words += ["no job: its steps"] if config.request.observation.is_foreign else []
    words += ["logical view"] if config.view.is_logical else []
    words += ["every value"] if config.request.observation.inspected is not None else []
    return ", ".join(words)


def run_silently(config: RunConfig, what: str, *, show: bool, run_job: RunJob) -> None:
    """Run a job, print how long it took, and hide its output unless `show` is set.

    Raises `RunFailed`.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        words = io.StringIO()
        out = sys.stdout if show else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        err = sys.stderr if show else words
        exit_code = run_job(config, out, err)
    if exit_code != 0:
        print(words.getvalue(), file=sys.stderr, end="")
        raise RunFailed(f"the run on {what} failed with exit code {exit_code}", exit_code)
    print(f"  {what:30}{time.monotonic() - started:6.1f} s", file=sys.stderr, flush=True)


def _require_complete(recordings: Sequence[Recording | None], what: str, *, single: bool) -> list[Recording]:
    """Return the recordings if every rank's is complete. A single worker without one called no job."""
    whole = []
    for rank, recording in enumerate(recordings):
        if recording is None and single:
            recording = Recording(rank=0, results=(), finished=True, steps=0, described=(), tensors={})
        if recording is None:
            raise RunFailed(
                f"rank {rank} of the run on {what} called no job",
                1,
                next_step="call the same jobs on every rank: remove `if rank == 0` around them",
            )
        if not recording.finished:
            raise RunFailed(
                f"rank {rank} of the run on {what} ended without finishing (os._exit?)",
                1,
                next_step="let the script end by itself, so that its recording is complete",
            )
        whole.append(recording)
    return whole


def _remove_recordings(folder: str) -> None:
    """Remove the recordings of an earlier run in the same folder."""
    for pattern in (".rank*.partial", "rank*.results", "rank*.safetensors", "rank*.values", "jobs.programs"):
        for file in Path(folder).glob(pattern):
            file.unlink()
