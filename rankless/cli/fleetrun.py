"""`rankless fleetrun`: the command line of Paddle's fleetrun, word for word."""

import argparse
import sys

from rankless.config.validation import make_run_config
from rankless.launch import agent
from rankless.launchers.fleetrun.parser import add_flags, table_of, take_flags
from rankless.launchers.fleetrun.run_config import fleetrun_program, fleetrun_request, notes
from rankless.launchers.fleetrun.tables import arguments_table
from rankless.terminal.progress_observer import ProgressObserver

NAME = "fleetrun"
HELP = (
    "Run a script as Paddle's fleetrun, or python -m paddle.distributed.launch, would: with their options, which are "
    "known with - and with _, their PADDLE_ variables, and torchrun's environment variables besides. "
    "One process runs per GPU, or one on the CPU. The first one's output is shown. Workers have no standard input."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags = take_flags(arguments)
    program = fleetrun_program(flags)
    config = make_run_config(program, fleetrun_request(flags, program))
    sys.stderr.write(arguments_table(table_of(flags)))
    sys.stderr.writelines(f"rankless fleetrun: {note}\n" for note in notes(flags))
    sys.stderr.flush()
    with ProgressObserver() as progress:
        return agent.run(
            config, on_record=progress.receive, out=sys.stdout, err=sys.stderr, making_room=progress.hidden
        )
