"""`rankless verify`: check that a script on N workers is the same training as on one."""

import argparse
import secrets
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import get_args

from rich.console import Console

from rankless.cli.extension_options import add_own_options, find_given_options
from rankless.cli.host_options import LOG_FOLDER_HELP, add_host_options, make_cluster, read_workers
from rankless.cli.json_output import add_json_option, make_json_header, read_json_destination
from rankless.cli.shared_run_options import (
    PLAN_HELP,
    add_backend_option,
    add_copies_option,
    add_program_options,
    add_view_options,
    count_default_workers,
    read_plan_file,
    read_program,
)
from rankless.config.environment import default_log_folder
from rankless.config.make_run_config import check_program, choose_run_mesh, choose_view
from rankless.config.meaning_of_extension_options import NamedWorkers, check_options, describe_processes, read_options
from rankless.config.mesh_option import MESH_HELP, parse_mesh
from rankless.config.rank_awareness import describe_view
from rankless.config.run_config import Cluster, Precision, Program, RunRequest
from rankless.errors import ConfigError
from rankless.launch.agent import make_job_runner
from rankless.launch.supervisor.fork_server_client import ForkServerPoolClient
from rankless.verify.decision_report import VerifyReport, make_report, render_details
from rankless.verify.run_and_decide import ComparisonOptions, Outcome, decide
from rankless.verify.runs import RunFailed, VerifyRuns

NAME = "verify"
TAKES_EXTENSION_OPTIONS = True
HELP = (
    "Run a script on one worker and on several with the same seeds, and compare the two trainings. "
    "Exit code: 0 if they are the same training, 1 if they are not, 2 for an invalid command line, "
    "3 if it could not be decided or a run failed."
)
JSON_CONTENT = VerifyReport
VERDICT_STYLES: Mapping[Outcome, str] = {"same": "bold green", "different": "bold red", "undecided": "bold yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "-n",
        dest="workers",
        type=int,
        metavar="N",
        help="Workers on each host. Default on one host: those of --mesh or --plan, else 2.",
    )
    parser.add_argument(
        "--devices", metavar="0,1|cpu", help="GPUs to use, or cpu. Default: GPUs if the host has any, else cpu."
    )
    add_backend_option(parser)
    parser.add_argument(
        "--seed", type=int, metavar="S", help="Seed of the random numbers of all runs. Default: random."
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Precision),
        help="Floating-point type to compute in. Default: the script's own, and float64 too if the runs diverge in it.",
    )
    parser.add_argument(
        "--against", metavar="PLAIN.PY", help="Compare with this plain PyTorch script too; it gets the same arguments."
    )
    parser.add_argument(
        "--steps", type=int, metavar="K", help="End all runs after K training steps. Default: the end of the script."
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="Allowed relative difference of each tensor. Default: from the measured noise floor.",
    )
    parser.add_argument(
        "--noise-runs", type=int, default=1, metavar="K", help="Runs that measure the noise floor. Default: 1."
    )
    add_json_option(parser, "the result")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="Print all tables and all differences after the verdict."
    )
    parser.add_argument("--mesh", type=parse_mesh, default=(), metavar="data=2,pipeline=2", help=MESH_HELP)
    parser.add_argument("--plan", metavar="FILE", help=PLAN_HELP)
    parser.add_argument("--keep", metavar="FOLDER", help="Keep the recordings of all runs in this folder.")
    parser.add_argument("--log-dir", default=default_log_folder(), metavar="DIR", help=LOG_FOLDER_HELP)
    parser.add_argument("--show", action="store_true", help="Show the output of the script too.")
    add_copies_option(parser)
    add_own_options(parser)
    add_host_options(parser)
    add_view_options(parser)
    add_program_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict and what led to it; return the verdict's exit code."""
    program = read_program(arguments)
    _check_options(arguments)
    destination = read_json_destination(arguments)
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    cluster, request = _read_request(arguments, program)
    workers = request.worker_count
    view = choose_view(program, request, choose_run_mesh(request, cluster), workers=workers)
    others = "".join(f" with {text}" for text in describe_processes(request))
    _tell(f"rankless verify: {_describe_program(program)}, on 1 and on {workers} workers{others}, seed {seed}")
    if view.reason:
        _tell(f"  {describe_view(view, workers)}")
    with ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="rankless-verify-"))
        runs = VerifyRuns(
            program=program,
            folder=folder,
            seed=seed,
            devices=arguments.devices,
            backend=arguments.backend,
            cluster=cluster,
            options=request.options,
            heterogeneous_workers=request.heterogeneous_workers,
            log_folder=arguments.log_dir,
            show=arguments.show,
            plan=request.plan,
            mesh=arguments.mesh,
            dtype=arguments.dtype,
            steps=arguments.steps,
            against=arguments.against,
            is_foreign=view.is_logical,
            is_logical=view.is_logical,
            zero=view.zero,
            run_job=make_job_runner(stack.enter_context(ForkServerPoolClient())),
        )
        comparison = ComparisonOptions(workers=workers, noise_runs=arguments.noise_runs, tolerance=arguments.tolerance)
        try:
            decision = decide(runs, comparison, _tell)
        except RunFailed as end:
            return end.exit_code  # the user has interrupted a run
    report = make_report(decision, workers=workers)
    with destination.reserve_standard_output():
        print_colored(report.text, VERDICT_STYLES[report.verdict])
        for part in render_details(decision, verbose=arguments.verbose):
            print(part)
    destination.write(make_json_header(NAME, program, seed=seed), report)
    return report.exit_code


def _tell(text: str) -> None:
    """Show what is being done, on standard error: the verdict comes first on standard output."""
    print(text, file=sys.stderr, flush=True)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for values that no run could use."""
    if arguments.noise_runs < 1:
        raise ConfigError(
            expected="at least 1 run for the noise floor", found=arguments.noise_runs, fix="omit --noise-runs"
        )
    if arguments.tolerance is not None and not 0 < arguments.tolerance < 1:
        raise ConfigError(
            expected="a tolerance between 0 and 1, relative to each tensor",
            found=arguments.tolerance,
            fix="set one such as 1e-6, or omit --tolerance: verify then measures the noise floor",
        )
    if arguments.against is not None:
        check_program(Program(kind="script", target=arguments.against))


def _read_request(arguments: argparse.Namespace, program: Program) -> tuple[Cluster | None, RunRequest]:
    """Return the hosts of the runs on several workers, and their workers, options and plan.

    Raises `ConfigError` for workers and other processes that these runs cannot have.
    """
    given = find_given_options(arguments)
    options, requested = read_options(given, NAME), read_workers(arguments, given)
    if arguments.copies and not options:
        raise ConfigError(
            expected="--copies with processes beside workers: verify compares whole runs, which lose no worker",
            found="workers alone",
            fix="omit --copies",
        )
    cluster, workers = _read_cluster(arguments, requested)
    request = RunRequest(
        worker_count=workers,
        heterogeneous_workers=requested.heterogeneous,
        mesh=arguments.mesh,
        plan=read_plan_file(arguments, program, workers=workers),
        options=options,
        copies=arguments.copies,
        view=arguments.view,
        zero=arguments.zero,
    )
    check_options(request, cluster)
    choose_run_mesh(request, cluster)
    return cluster, request


def _describe_program(program: Program) -> str:
    return {"script": program.target, "module": f"-m {program.target}", "code": "-c …"}[program.kind]


def _read_cluster(arguments: argparse.Namespace, requested: NamedWorkers) -> tuple[Cluster | None, int]:
    """Return the hosts, if there are several, and the total number of workers, with heterogeneous ones."""
    arguments.workers, heterogeneous = requested.worker_count, requested.heterogeneous
    cluster = make_cluster(arguments, requested.hosts, heterogeneous=heterogeneous)
    if cluster is None:
        if arguments.workers is not None:
            return None, arguments.workers + heterogeneous
        return None, heterogeneous + count_default_workers(arguments, otherwise=2)
    if cluster.host_index > 0:
        raise ConfigError(
            expected=f"rankless verify on host 0, {cluster.hosts[0]}",
            found=f"it on host {cluster.host_index}",
            fix="start `rankless run` with the same options here: it joins the run on all hosts",
        )
    return cluster, cluster.workers


def print_colored(text: str, style: str) -> None:
    """Print text in a style such as "bold green" on a terminal, and plainly elsewhere or if NO_COLOR is set."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(text, style=style, markup=False)
