"""`rankless plan`: show the parallel plan of a script's jobs."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable

import msgspec

from rankless.cli.extension_options import add_own_options, find_given_options
from rankless.cli.host_options import LOG_FOLDER_HELP, read_workers
from rankless.cli.json_output import (
    add_json_option,
    make_json_header,
    read_json_destination,
    require_different_files,
    require_writable_file,
)
from rankless.cli.shared_run_options import (
    PLAN_HELP,
    add_copies_option,
    add_program_options,
    add_view_options,
    count_default_workers,
    read_plan_file,
    read_program,
)
from rankless.config.environment import default_log_folder
from rankless.config.make_run_config import make_run_config
from rankless.config.meaning_of_extension_options import count_row_holders, read_options
from rankless.config.mesh_option import MESH_HELP, parse_mesh
from rankless.config.plan_file import name_axes, write_plan
from rankless.config.program_source_files import digest_source
from rankless.config.run_config import Program, RunConfig, RunObservation, RunRequest
from rankless.errors import ConfigError
from rankless.launch.agent import make_job_runner
from rankless.plan_picture.picture_data import collect_plan
from rankless.plan_picture.picture_file import find_format, write_picture
from rankless.records.job_programs import DefinedJob, ProgramRecord, read_program_records
from rankless.records.parallel_plan import JobPlan, ParallelPlan, PlannedAxis
from rankless.terminal.plan_table import WIDTH, PlanReport, make_plan_report, render_plan
from rankless.verify.runs import INTERRUPTED, RunFailed, run_silently
from rankless.version import VERSION

NAME = "plan"
TAKES_EXTENSION_OPTIONS = True
HELP = (
    "Show the parallel plan of a script's jobs on several workers, or what they divide of an ordinary loop: the "
    "placement of every input, and every transfer of a step with its bytes, line, module and reason. The script runs "
    "until its first training steps are done."
)
JSON_CONTENT = PlanReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "-n",
        dest="workers",
        type=int,
        metavar="N",
        help="Number of workers. Default: those of --mesh or --plan, else 2.",
    )
    parser.add_argument("--mesh", type=parse_mesh, default=(), metavar="data=2,pipeline=2", help=MESH_HELP)
    parser.add_argument(
        "--devices", metavar="0,1|cpu", help="GPUs to use, or cpu. Default: GPUs if the host has any, else cpu."
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="Seed of the random numbers of all workers. Default: random."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        metavar="K",
        help="Training steps to run; the plan shows the jobs called by then, or the last of these steps of an ordinary "
        "loop. Each optimizer.step() counts. Default: 1.",
    )
    parser.add_argument("--save", metavar="FILE", help="Write the plan to this file, for rankless run --plan.")
    parser.add_argument("--picture", metavar="FILE.svg|FILE.html", help=PICTURE_HELP)
    parser.add_argument("--plan", metavar="FILE", help=PLAN_HELP)
    add_json_option(parser, "the plan")
    parser.add_argument("--log-dir", default=default_log_folder(), metavar="DIR", help=LOG_FOLDER_HELP)
    parser.add_argument("--show", action="store_true", help="Show the output of the script too.")
    add_copies_option(parser)
    add_own_options(parser)
    add_view_options(parser)
    add_program_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of the jobs; return 0, or 1 if the script fails."""
    program, destination = read_program(arguments), read_json_destination(arguments)
    picture = read_picture_path(arguments)
    request = _read_request(arguments)
    with tempfile.TemporaryDirectory(prefix="rankless-plan-") as folder, destination.reserve_standard_output():
        config = _make_config(arguments, program, request, folder)
        _require_jobs(arguments, config)
        try:
            _run_script(config, show=arguments.show)
        except RunFailed as end:
            print(f"rankless plan: {end}")
            return INTERRUPTED if end.exit_code == INTERRUPTED else 1
        records = list(read_program_records(folder))
        report = make_plan_report(
            records,
            workers=config.worker_count,
            servers=count_row_holders(request),
            steps=arguments.steps,
        )
    if not (report.jobs or report.not_reached or report.without_program or report.recorded_steps):
        raise ConfigError(
            expected="a script that defines at least one job, or trains as an ordinary loop in the logical view",
            found=f"{program.target}, which does neither",
            fix="put @rankless.job(model=…, optimizer=…) on its training function, or start a loop that knows ranks "
            "with --logical",
        )
    if arguments.save is not None:
        write_plan(arguments.save, _make_parallel_plan(records, program, workers=config.worker_count, mesh=config.mesh))
    if not destination.is_standard_output:
        print(render_plan(report, shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH))
    if picture is not None:
        write_picture(picture, collect_plan(program.text, records, name_axes(config.mesh, config.worker_count)))
    destination.write(make_json_header(NAME, program, seed=config.seed), report)
    return 0


def _read_request(arguments: argparse.Namespace) -> RunRequest:
    """Return the workers and other processes that the options request. Raises `ConfigError` for impossible ones."""
    given = find_given_options(arguments)
    options, requested = read_options(given, NAME), read_workers(arguments, given)
    if requested.hosts:
        raise ConfigError(
            expected="all workers on this host, where the plan is found",
            found="addresses of other hosts",
            fix="give their number",
        )
    workers = requested.worker_count
    if workers is None:
        workers = count_default_workers(arguments, otherwise=2)
    request = RunRequest(
        worker_count=workers + requested.heterogeneous,
        heterogeneous_workers=requested.heterogeneous,
        options=options,
        copies=arguments.copies,
    )
    if request.worker_count < 2:
        raise ConfigError(
            expected="at least 2 workers: on one worker, jobs run as plain PyTorch without communication",
            found=request.worker_count,
            fix="set -n to the number of workers of the job",
        )
    return request


def _make_config(arguments: argparse.Namespace, program: Program, request: RunRequest, folder: str) -> RunConfig:
    """Return the configuration of a run that stops after some steps and records its programs in `folder`."""
    plan = read_plan_file(arguments, program, workers=request.worker_count)
    return make_run_config(
        program,
        msgspec.structs.replace(
            request,
            mesh=arguments.mesh,
            devices=arguments.devices,
            seed=arguments.seed,
            log_folder=arguments.log_dir,
            progress=False,
            plan=plan,
            view=arguments.view,
            zero=arguments.zero,
            observation=RunObservation(stop_after_steps=arguments.steps, programs=folder),
        ),
    )


def _require_jobs(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Raise `ConfigError` for a script without jobs if an option needs jobs."""
    given = [name for name in ("save", "picture") if getattr(arguments, name) is not None]
    if config.view.is_logical and given:
        raise ConfigError(
            expected=f"a script with jobs for --{given[0]}: a parallel plan is one of jobs",
            found=f"{config.program.target}, an ordinary loop in the logical view",
            fix=f"omit --{given[0]}, or make its training step a job; --json writes what this loop moves",
        )


def _run_script(config: RunConfig, *, show: bool) -> None:
    """Run the script until its first steps are done. Raises `RunFailed`."""
    program, steps, workers = config.program, config.request.observation.stop_after_steps, config.worker_count
    print(
        f"rankless plan: {program.target if program.kind != 'code' else '-c …'}, {workers} workers, "
        f"{steps} training step{'s' if steps != 1 else ''}",
        flush=True,
    )
    run_silently(config, f"{workers} workers", show=show, run_job=make_job_runner())


def _make_parallel_plan(
    records: Iterable[ProgramRecord], program: Program, *, workers: int, mesh: tuple[PlannedAxis, ...] = ()
) -> ParallelPlan:
    """Return the plan of a run from what it has recorded.

    Args:
        records: The records of its jobs.
        program: The program that ran.
        workers: The number of workers.
        mesh: The axes of their mesh. Default: one axis `data`.

    Raises:
        ConfigError: Two jobs have one name, by which the plan would have to find them.
    """
    jobs: dict[str, JobPlan] = {}
    for record in records:
        if not isinstance(record, DefinedJob) or record.plan is None:
            continue
        if record.job in jobs:
            raise ConfigError(
                expected="jobs with names of their own, to save their plans by name",
                found=f"two jobs {record.job!r}",
                fix="give their functions different names",
                where=record.line,
            )
        jobs[record.job] = record.plan
    return ParallelPlan(
        rankless=VERSION,
        program=program.text,
        source_sha256=digest_source(program),
        axes=name_axes(mesh, workers),
        jobs=jobs,
    )


PICTURE_HELP = (
    "Draw the plan in this file: the mesh, who holds which module, what moves, and the memory. plan.svg is a picture, "
    "plan.html a page with tables too."
)


def read_picture_path(arguments: argparse.Namespace) -> str | None:
    """Return the file for the picture; None without one.

    Raises:
        ConfigError: It is of another kind, cannot be written, or is the file of another option.
    """
    path: str | None = arguments.picture
    if path is None:
        return None
    if find_format(path) is None:
        raise ConfigError(
            expected="--picture FILE with the extension .svg or .html",
            found=repr(path),
            fix="for example --picture plan.svg, before the script",
        )
    require_writable_file("--picture", path)
    require_different_files(
        {
            "--picture": path,
            "--json": arguments.json,
            "--save": arguments.save,
            "--plan": arguments.plan,
            "the script": arguments.script[0] if arguments.script else None,
        }
    )
    return path
