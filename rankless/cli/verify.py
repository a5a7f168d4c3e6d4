"""`rankless verify`: check that a script on N workers is the same training as on one."""

import argparse
import secrets
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import msgspec

from rankless.cli.host_options import add_host_options, make_cluster
from rankless.cli.program_options import add_program_options, read_program
from rankless.config.run_config import Cluster, Precision, Program
from rankless.config.validation import check_program
from rankless.errors import ConfigError
from rankless.launch.agent import make_job_runner
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient
from rankless.records.job_results import JobCalled
from rankless.verify.comparison import Comparison, compare
from rankless.verify.coverage import list_not_covered
from rankless.verify.first_difference import render_first_value
from rankless.verify.reference_run import compare_with_reference
from rankless.verify.runs import INTERRUPTED, RunFailed, VerifyRuns
from rankless.verify.verdict import (
    VerifyReport,
    encode_report,
    make_failed_report,
    make_report,
    render_coverage,
    render_doubt,
    render_table,
    render_tolerance,
    render_verdict,
)

NAME = "verify"
HELP = (
    "Run a script on one worker and on several with the same seeds, and compare the two trainings. "
    "Exit code: 0 if they are the same training, 1 if they are not or a run fails, 2 for an invalid command line."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="Workers on each host. Default: 2.")
    parser.add_argument(
        "--devices", metavar="0,1|cpu", help="GPUs to use, or cpu. Default: GPUs if the host has any, else cpu."
    )
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
    parser.add_argument("--json", metavar="FILE", help="Write the result to this file as JSON too.")
    parser.add_argument("--keep", metavar="FOLDER", help="Keep the recordings of all runs in this folder.")
    parser.add_argument("--log-dir", default="log", metavar="DIR", help="Folder for the logs of runs. Default: log.")
    parser.add_argument("--show", action="store_true", help="Show the output of the script too.")
    add_host_options(parser)
    add_program_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the verdict; return 0 if it is the same training, 1 if not."""
    program = read_program(arguments)
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
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    name = {"script": program.target, "module": f"-m {program.target}", "code": "-c …"}[program.kind]
    if arguments.against is not None:
        check_program(Program(kind="script", target=arguments.against))
    cluster, workers = _read_cluster(arguments)
    print(f"rankless verify: {name}, on 1 and on {workers} workers, seed {seed}", flush=True)
    with ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="rankless-verify-"))
        runs = VerifyRuns(
            program=program,
            folder=folder,
            seed=seed,
            devices=arguments.devices,
            cluster=cluster,
            log_folder=arguments.log_dir,
            show=arguments.show,
            dtype=arguments.dtype,
            steps=arguments.steps,
            against=arguments.against,
            run_job=make_job_runner(stack.enter_context(ForkServerPoolClient())),
        )
        options = ComparisonOptions(workers=workers, noise_runs=arguments.noise_runs, tolerance=arguments.tolerance)
        try:
            report = _compare_deciding_precision(runs, options)
        except RunFailed as end:
            if end.exit_code == INTERRUPTED:
                return INTERRUPTED
            report = make_failed_report(str(end), workers=workers)
    if arguments.json is not None:
        Path(arguments.json).write_bytes(encode_report(report))
    print(render_verdict(report))
    return 0 if report.same else 1


def _read_cluster(arguments: argparse.Namespace) -> tuple[Cluster | None, int]:
    """Return the hosts, if there are several, and the total number of workers."""
    cluster = make_cluster(arguments)
    if cluster is None:
        return None, 2 if arguments.workers is None else arguments.workers
    if cluster.host_index > 0:
        raise ConfigError(
            expected=f"rankless verify on host 0, {cluster.hosts[0]}",
            found=f"it on host {cluster.host_index}",
            fix="start `rankless run` with the same options here: it joins the run on all hosts",
        )
    return cluster, sum(host.workers for host in cluster.hosts)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How to compare the runs."""

    workers: int
    noise_runs: int
    tolerance: float | None


def _compare_deciding_precision(runs: VerifyRuns, options: ComparisonOptions) -> VerifyReport:
    """Compare in the script's own precision, and in float64 if only that separates rounding from a fault."""
    comparison, report = _run_and_compare(runs, options)
    if runs.dtype is not None or not comparison.needs_float64:
        return _locate_first_difference(runs, options, comparison, report)
    print(f"{render_doubt(report)}; repeating in float64:", flush=True)
    exact = replace(runs, dtype="float64")
    try:
        decisive, decision = _run_and_compare(exact, options)
    except RunFailed as end:
        if end.exit_code == INTERRUPTED:
            raise
        stands = msgspec.structs.replace(report, float64_failure=str(end))
        return _locate_first_difference(runs, options, comparison, stands)
    return _locate_first_difference(exact, options, decisive, msgspec.structs.replace(decision, own_precision=report))


def _run_and_compare(runs: VerifyRuns, options: ComparisonOptions) -> tuple[Comparison, VerifyReport]:
    """Make all runs, compare them and print the table."""
    one = runs.run_one()
    if not any(isinstance(result, JobCalled) for result in one.results):
        raise ConfigError(
            expected="a script that calls at least one job",
            found=f"{runs.program.target}, which calls none",
            fix="put @rankless.job(model=…, optimizer=…) on its training function: verify compares results of jobs",
        )
    many, noise, reference = (
        runs.run_many(options.workers),
        runs.run_perturbed(options.noise_runs),
        runs.run_reference(),
    )
    comparison = compare(one, many, noise, tolerance=options.tolerance)
    if reference is not None:
        comparison = compare_with_reference(comparison, reference, one, many, noise)
    report = msgspec.structs.replace(
        make_report(comparison, workers=options.workers),
        against=None if reference is None else reference.name,
        not_covered=list_not_covered(comparison, one, runs.read_programs()),
    )
    tolerance = "" if report.tolerance is None else render_tolerance(report.tolerance)
    parts = (render_table(comparison), tolerance, render_coverage(report.not_covered))
    print("\n" + "\n".join(part for part in parts if part) + "\n", flush=True)
    return comparison, report


def _locate_first_difference(
    runs: VerifyRuns, options: ComparisonOptions, comparison: Comparison, report: VerifyReport
) -> VerifyReport:
    """If the runs diverge, run the call in question again and add the first value that differs to the report."""
    finding = comparison.findings[0] if comparison.findings else None
    unmet = report.tolerance is not None and report.tolerance.unmet is not None
    if finding is None or finding.call is None or unmet:
        return report
    print(f"searching for the first value that differs in call {finding.call.call} of {finding.call.job}:", flush=True)
    try:
        first = runs.find_first_value(
            finding.call, workers=options.workers, step=finding.location.step + 1, tolerance=options.tolerance
        )
    except RunFailed as end:
        if end.exit_code == INTERRUPTED:
            raise
        print(f"  the search failed: {end}", flush=True)
        return report
    if first is not None:
        print(render_first_value(first), flush=True)
    return msgspec.structs.replace(report, first_value=first)
