"""`rankless fleetrun`: the command line of Paddle's fleetrun."""

import argparse
import sys

from rankless.config.make_run_config import make_run_config
from rankless.extensions.fleetrun.parser import add_flags, list_arguments, read_flags
from rankless.extensions.fleetrun.run_config import describe_ignored_options, fleetrun_program, fleetrun_request
from rankless.extensions.fleetrun.tables import format_arguments_table
from rankless.launch import agent
from rankless.terminal.lazy_progress_display import ProgressObserver

NAME = "fleetrun"
HELP = (
    "Run a script as Paddle's fleetrun or python -m paddle.distributed.launch would. It accepts their options, "
    "with - or _ between words, and their PADDLE_ variables. It also sets torchrun's environment variables. "
    "It runs one process per GPU, or one on the CPU, and shows the output of the first. Workers have no standard input."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags = read_flags(arguments)
    program = fleetrun_program(flags)
    config = make_run_config(program, fleetrun_request(flags, program))
    sys.stderr.write(format_arguments_table(list_arguments(flags)))
    sys.stderr.writelines(f"rankless fleetrun: {note}\n" for note in describe_ignored_options(flags))
    sys.stderr.flush()
    with ProgressObserver() as progress:
        return agent.run(
            config,
            on_record=progress.receive,
            out=sys.stdout,
            err=sys.stderr,
            hide_progress=progress.hidden,
            context=agent.AgentContext(cursor=progress.cursor),
        )
