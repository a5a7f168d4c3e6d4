"""`rankless verify`: is a script on N workers the same training as on one?"""

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
from rankless.launch.agent import job_runner
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
    failed_report,
    make_report,
    render_coverage,
    render_doubt,
    render_table,
    render_tolerance,
    render_verdict,
)

NAME = "verify"
HELP = "Run a script on one worker and on several with the same seeds, and compare the two trainings."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="how many workers, on each host (2)")
    parser.add_argument("--devices", metavar="0,1|cpu", help="GPUs to use, or cpu (GPUs if the host has them)")
    parser.add_argument("--seed", type=int, metavar="S", help="where all runs' random numbers start (drawn)")
    parser.add_argument(
        "--dtype", choices=get_args(Precision), help="compute in it (the script's own, and float64 where that parts)"
    )
    parser.add_argument("--against", metavar="PLAIN.PY", help="compare with this plain script too; same arguments")
    parser.add_argument("--steps", type=int, metavar="K", help="end all runs after K training steps (the script's end)")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="allow this part of each tensor (what the noise floor allows)"
    )
    parser.add_argument("--noise-runs", type=int, default=1, metavar="K", help="runs for the noise floor (1)")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the recordings of all runs there")
    parser.add_argument("--log-dir", default="log", metavar="DIR", help="where logs of runs go (log)")
    parser.add_argument("--show", action="store_true", help="show the script's own output, too")
    add_host_options(parser)
    add_program_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the verdict; 0 if it is the same training, 1 if not."""
    program = read_program(arguments)
    if arguments.noise_runs < 1:
        raise ConfigError(
            expected="at least 1 run for the noise floor", found=arguments.noise_runs, fix="leave --noise-runs away"
        )
    if arguments.tolerance is not None and not 0 < arguments.tolerance < 1:
        raise ConfigError(
            expected="a tolerance between 0 and 1, a part of each tensor",
            found=arguments.tolerance,
            fix="give one as 1e-6, or leave --tolerance away: the noise floor is measured",
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
            run_job=job_runner(stack.enter_context(ForkServerPoolClient())),
        )
        options = ComparisonOptions(workers=workers, noise_runs=arguments.noise_runs, tolerance=arguments.tolerance)
        try:
            report = _compare_deciding_precision(runs, options)
        except RunFailed as end:
            if end.exit_code == INTERRUPTED:
                return INTERRUPTED
            report = failed_report(str(end), workers=workers)
    if arguments.json is not None:
        Path(arguments.json).write_bytes(encode_report(report))
    print(render_verdict(report))
    return 0 if report.same else 1


def _read_cluster(arguments: argparse.Namespace) -> tuple[Cluster | None, int]:
    """The hosts, if there are several, and how many workers that makes."""
    cluster = make_cluster(arguments)
    if cluster is None:
        return None, 2 if arguments.workers is None else arguments.workers
    if cluster.host_index > 0:
        raise ConfigError(
            expected=f"rankless verify on host 0, {cluster.hosts[0]}",
            found=f"it on host {cluster.host_index}",
            fix="start `rankless run` with the same options here: it takes part in the run on all hosts",
        )
    return cluster, sum(host.workers for host in cluster.hosts)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """What is asked of a trial."""

    workers: int
    noise_runs: int
    tolerance: float | None


def _compare_deciding_precision(runs: VerifyRuns, options: ComparisonOptions) -> VerifyReport:
    """The report on the script's own precision, or on float64 where only that can tell rounding from a fault."""
    comparison, report = _run_and_compare(runs, options)
    if runs.dtype is not None or not comparison.needs_float64:
        return _locate_first_difference(runs, options, comparison, report)
    print(f"{render_doubt(report)}; so again in float64:", flush=True)
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
    """All runs made and compared; the table is printed."""
    one = runs.run_one()
    if not any(isinstance(result, JobCalled) for result in one.results):
        raise ConfigError(
            expected="a script that calls at least one job",
            found=f"{runs.program.target}, which calls none",
            fix="put @rankless.job(model=…, optimizer=…) on its training function: results of jobs are compared",
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
    """The report with the first value that differs, where numbers part: the call in question is run once more."""
    finding = comparison.findings[0] if comparison.findings else None
    unmet = report.tolerance is not None and report.tolerance.unmet is not None
    if finding is None or finding.call is None or unmet:
        return report
    print(f"looking for the first value that differs, in call {finding.call.call} of {finding.call.job}:", flush=True)
    try:
        first = runs.find_first_value(
            finding.call, workers=options.workers, step=finding.location.step + 1, tolerance=options.tolerance
        )
    except RunFailed as end:
        if end.exit_code == INTERRUPTED:
            raise
        print(f"  it cannot be told: {end}", flush=True)
        return report
    if first is not None:
        print(render_first_value(first), flush=True)
    return msgspec.structs.replace(report, first_value=first)
