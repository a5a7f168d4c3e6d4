"""`rankless run`: a script on one or more workers of this host, or of several."""

import argparse
import sys

from rankless.cli.host_options import add_host_options, make_cluster
from rankless.cli.program_options import add_program_options, read_program
from rankless.config.run_config import RunRequest
from rankless.config.validation import make_run_config
from rankless.launch import agent
from rankless.terminal.progress_observer import ProgressObserver

NAME = "run"
HELP = (
    "Run a script on one or more workers of this host, or of several, one per device. "
    "Workers have no standard input: what reads it, as input() does, finds its end."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="how many workers on each host (1)")
    parser.add_argument("--devices", metavar="0,1|cpu", help="GPUs to use, or cpu (GPUs if the host has them)")
    parser.add_argument("--threads", type=int, metavar="K", help="threads per worker (cores / workers)")
    parser.add_argument("--seed", type=int, metavar="S", help="where all workers' random numbers start (drawn)")
    parser.add_argument("--show", choices=("first", "all"), default="first", help="whose output to show (rank 0's)")
    parser.add_argument("--log-dir", default="log", metavar="DIR", help="where logs of runs go (log)")
    parser.add_argument(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="end a job in which ranks have waited S seconds in vain; 0: never (learned from its steps)",
    )
    parser.add_argument("--no-warm", action="store_true", help="start plain processes, each importing torch itself")
    parser.add_argument("--no-progress", action="store_true", help="no progress line")
    add_host_options(parser)
    add_program_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    config = make_run_config(
        read_program(arguments),
        RunRequest(
            worker_count=1 if arguments.workers is None else arguments.workers,
            devices=arguments.devices,
            threads=arguments.threads,
            seed=arguments.seed,
            log_folder=arguments.log_dir,
            show=arguments.show,
            warm=not arguments.no_warm,
            progress=not arguments.no_progress,
            cluster=make_cluster(arguments),
            hang_timeout_seconds=arguments.hang_timeout,
        ),
    )
    with ProgressObserver() as progress:
        return agent.run(
            config, on_record=progress.receive, out=sys.stdout, err=sys.stderr, making_room=progress.hidden
        )
