"""`rankless doctor`: check for anything that would make a job hang or fail."""

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.status import Status

from rankless.cli.json_output import add_json_option, make_json_header, read_json_destination
from rankless.config.environment import default_log_folder
from rankless.config.extensions import list_own
from rankless.config.hosts_and_addresses import DEFAULT_PORT, Host, parse_hosts, read_hostfile, require_port
from rankless.errors import ConfigError
from rankless.launch.doctor.run_all_checks import DoctorConfig, DoctorFindings, run_diagnosis
from rankless.terminal.doctor_table import DoctorReport, make_doctor_report, render_doctor_report

NAME = "doctor"
HELP = (
    "Check for anything that would make a job hang or fail, on this host or between several, and show how to fix it. "
    "Exit code: 0 if no check fails (there may be warnings), 1 if one fails, 2 for an invalid command line."
)
INTERRUPTED = 130
JSON_CONTENT = DoctorReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--hosts", metavar="A:4,B:4", help="Hosts of the job, with their numbers of workers. Default: this host only."
    )
    parser.add_argument("--hostfile", metavar="FILE", help="File with one host per line, such as `10.0.0.1 slots=4`.")
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="Workers on each host. Default: 1.")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="PORT",
        help=f"Port on which host 0 will listen. Default: {DEFAULT_PORT}.",
    )
    parser.add_argument("--no-ssh", action="store_true", help="Check the other hosts from outside only, without ssh.")
    parser.add_argument(
        "--log-dir",
        default=default_log_folder(),
        metavar="DIR",
        help="Folder in which jobs will write logs. Default: RANKLESS_LOG_DIR, else log.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"Skip the checks that start something: {_list_started()}.",
    )
    add_json_option(parser, "the results", file_is_optional=True)


def _list_started() -> str:
    """Return what the checks start, those of our extensions too, as "the test job and the collective"."""
    checks = (extension.doctor_check for extension in list_own())
    *first, last = ["the test job", "the collective", *(each.starts for each in checks if each and each.starts)]
    return f"{', '.join(first)} and {last}"


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print their results, and return 1 if a job would fail."""
    destination = read_json_destination(arguments)
    require_port(arguments.port)
    config = DoctorConfig(
        hosts=_read_hosts(arguments),
        workers=arguments.workers or 1,
        port=arguments.port,
        log_folder=arguments.log_dir,
        without_ssh=arguments.no_ssh,
        quick=arguments.quick,
    )
    try:
        findings = run_with_status(config)
    except KeyboardInterrupt:
        return INTERRUPTED
    places = [host.address for host in config.hosts] or ["this host"]
    report = make_doctor_report(findings.results, places=places, not_looked_at=findings.skipped_checks)
    if not destination.is_standard_output:
        render_doctor_report(report, sys.stdout)
    destination.write(make_json_header(NAME), report)
    return 1 if report.causes else 0


def run_with_status(config: DoctorConfig) -> DoctorFindings:
    """Run the checks, and show the current phase if standard error is a terminal."""
    console = Console(stderr=True)
    shown: AbstractContextManager[Status | None] = nullcontext()
    if console.is_terminal and not console.is_dumb_terminal:
        shown = console.status("checking")
    with shown as status:
        return run_diagnosis(config, status.update if status is not None else lambda _: None)


def _read_hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ConfigError(
            expected="one way of naming the hosts", found="--hosts and --hostfile", fix="omit one of them"
        )
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigError(expected="at least 1 worker", found=arguments.workers, fix="set -n to a number from 1 up")
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts, workers_per_host=arguments.workers)
    if arguments.hostfile is not None:
        return read_hostfile(arguments.hostfile, workers_per_host=arguments.workers)
    return ()
