"""`rankless torchrun`: the command line of torchrun."""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack

import msgspec

from rankless.config.make_run_config import check_program, make_run_config
from rankless.config.run_config import Program
from rankless.extensions.torchrun.parser import TorchrunFlags, add_flags, read_flags
from rankless.extensions.torchrun.run_config import (
    describe_ignored_options,
    torchrun_program,
    torchrun_request,
    use_chosen_python,
)
from rankless.launch import agent
from rankless.terminal.lazy_progress_display import ProgressObserver

NAME = "torchrun"
HELP = (
    "Run a script written for torchrun, with torchrun's options and environment variables. The command accepts all "
    "options of torchrun, with - or _ between words, and its PET_ variables. Workers have no standard input."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags = read_flags(arguments)
    return run_program(NAME, flags, torchrun_program(flags), describe_ignored_options(flags))


def run_program(command: str, flags: TorchrunFlags, program: Program, messages: list[str]) -> int:
    """Run `program` as `flags` say, after printing a line with the notices, and return the exit code."""
    check_program(program)
    program = use_chosen_python(program)
    with ExitStack() as stack:
        request = torchrun_request(flags, program)
        if request.log_folder == os.devnull:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rankless-"))
            request = msgspec.structs.replace(request, log_folder=folder)
        config = make_run_config(program, request)
        if messages:
            print(f"rankless {command}: {'; '.join(messages)}", file=sys.stderr, flush=True)
        progress = stack.enter_context(ProgressObserver())
        return agent.run(
            config,
            on_record=progress.receive,
            out=sys.stdout,
            err=sys.stderr,
            hide_progress=progress.hidden,
            context=agent.AgentContext(cursor=progress.cursor),
        )
