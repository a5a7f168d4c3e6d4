"""`rankless fleetrun`: the command line of Paddle's fleetrun, word for word."""

import argparse
import sys

from rankless.cli.fleetrun_flags import add_flags, table_of, take_flags
from rankless.cli.progress_line import ProgressLine
from rankless.launch import agent
from rankless.launch.fleet_tables import arguments_table
from rankless.plan.check import make_run_plan
from rankless.plan.fleetrun import fleetrun_program, fleetrun_request, notes

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
    plan = make_run_plan(program, fleetrun_request(flags, program))
    sys.stderr.write(arguments_table(table_of(flags)))
    sys.stderr.writelines(f"rankless fleetrun: {note}\n" for note in notes(flags))
    sys.stderr.flush()
    with ProgressLine() as line:
        return agent.run(plan, on_record=line.take, out=sys.stdout, err=sys.stderr, making_room=line.making_room)
