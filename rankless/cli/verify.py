"""`rankless verify`: is a script on N workers the same training as on one?"""

import argparse
import io
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rankless.cli.program import add_program_arguments, take_program
from rankless.errors import PlanError
from rankless.launch import agent
from rankless.observe.comparison import compare
from rankless.observe.recordings import Recording, read_recordings
from rankless.observe.verdict import (
    Report,
    encode_report,
    failed_report,
    make_report,
    render_table,
    render_verdict,
)
from rankless.plan.check import make_run_plan
from rankless.plan.run_plan import Program, RunRequest
from rankless.records.results import Called

NAME = "verify"
HELP = "Run a script on one worker and on several with the same seeds, and compare the two trainings."

INTERRUPTED = 130


class _Ended(Exception):
    """Why the runs cannot be compared: a run that failed, or was interrupted."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("-n", dest="workers", type=int, default=2, metavar="N", help="how many workers (2)")
    parser.add_argument("--devices", metavar="0,1|cpu", help="GPUs to use, or cpu (GPUs if the host has them)")
    parser.add_argument("--seed", type=int, metavar="S", help="where all runs' random numbers start (drawn)")
    parser.add_argument("--noise-runs", type=int, default=1, metavar="K", help="runs for the noise floor (1)")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the recordings of all runs there")
    parser.add_argument("--log-dir", default="log", metavar="DIR", help="where logs of runs go (log)")
    parser.add_argument("--show", action="store_true", help="show the script's own output, too")
    add_program_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the verdict; 0 if it is the same training, 1 if not."""
    program = take_program(arguments)
    if arguments.noise_runs < 1:
        raise PlanError(
            expected="at least 1 run for the noise floor", found=arguments.noise_runs, fix="leave --noise-runs away"
        )
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(2**32)
    name = {"script": program.target, "module": f"-m {program.target}", "code": "-c …"}[program.kind]
    print(f"rankless verify: {name}, on 1 and on {arguments.workers} workers, seed {arguments.seed}", flush=True)
    with ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="rankless-verify-"))
        try:
            report = _verify(program, arguments, folder)
        except _Ended as end:
            report = failed_report(str(end), workers=arguments.workers)
            if end.exit_code == INTERRUPTED:
                return INTERRUPTED
    if arguments.json is not None:
        Path(arguments.json).write_bytes(encode_report(report))
    print(render_verdict(report))
    return 0 if report.same else 1


def _verify(program: Program, arguments: argparse.Namespace, folder: str) -> Report:
    [one] = _record(program, arguments, os.path.join(folder, "one"), workers=1)
    if not any(isinstance(result, Called) for result in one.results):
        raise PlanError(
            expected="a script that calls at least one job",
            found=f"{program.target}, which calls none",
            fix="put @rankless.job(model=…, optimizer=…) on its training function: results of jobs are compared",
        )
    many = _record(program, arguments, os.path.join(folder, "many"), workers=arguments.workers)
    noise: list[Recording] = []
    for number in range(arguments.noise_runs):
        place = os.path.join(folder, f"noise{number}")
        noise += _record(program, arguments, place, workers=1, perturbation_seed=arguments.seed + number)
    comparison = compare(one, many, noise)
    print(f"\n{render_table(comparison)}\n")
    return make_report(comparison, workers=arguments.workers)


def _record(
    program: Program,
    arguments: argparse.Namespace,
    folder: str,
    *,
    workers: int,
    perturbation_seed: int | None = None,
) -> list[Recording]:
    """What every rank of one run recorded. Raises `_Ended` if the run failed, or a rank recorded nothing."""
    plan = make_run_plan(
        program,
        RunRequest(
            worker_count=workers,
            devices=arguments.devices,
            seed=arguments.seed,
            log_folder=arguments.log_dir,
            progress=False,
            recording=os.path.abspath(folder),
            perturbation_seed=perturbation_seed,
        ),
    )
    _remove_old(folder)
    what = f"{workers} worker{'s' if workers != 1 else ''}" + (", disturbed" if perturbation_seed is not None else "")
    started = time.monotonic()
    with ExitStack() as stack:
        words = io.StringIO()
        out = sys.stdout if arguments.show else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        exit_code = agent.run(
            plan, on_record=lambda _record: None, out=out, err=sys.stderr if arguments.show else words
        )
    if exit_code != 0:
        print(words.getvalue(), file=sys.stderr, end="")
        raise _Ended(f"the run on {what} failed with exit code {exit_code}", exit_code)
    print(f"  {what:24}{time.monotonic() - started:6.1f} s", flush=True)
    return _whole(read_recordings(folder, workers), what, single=workers == 1)


def _whole(recordings: Sequence[Recording | None], what: str, *, single: bool) -> list[Recording]:
    """The recordings, if each rank's is there to its end; a lone worker without any has called no job."""
    whole = []
    for rank, recording in enumerate(recordings):
        if recording is None and single:
            recording = Recording(rank=0, results=(), finished=True, steps=0, described=(), tensors={})
        if recording is None:
            raise _Ended(f"rank {rank} of the run on {what} called no job", 1)
        if not recording.finished:
            raise _Ended(f"rank {rank} of the run on {what} ended without leaving (os._exit?)", 1)
        whole.append(recording)
    return whole


def _remove_old(folder: str) -> None:
    """Recordings that an earlier run has left in the same place would be taken for this one's."""
    for pattern in ("rank*.results", "rank*.safetensors"):
        for file in Path(folder).glob(pattern):
            file.unlink()
