"""`rankless launch`: the command line of `python -m torch.distributed.launch`."""

import argparse

import msgspec

from rankless.config.validation import check_program
from rankless.errors import ConfigError
from rankless.extensions.torchrun.command import run_program
from rankless.extensions.torchrun.local_rank_argument import find_rank_option
from rankless.extensions.torchrun.parser import add_flags, read_flags
from rankless.extensions.torchrun.run_config import LOCAL_RANK, describe_ignored_options, torchrun_program

NAME = "launch"
HELP = (
    "Run a script written for python -m torch.distributed.launch, with its options: torchrun's and --use-env. "
    "Without --use-env, each worker gets its local rank as the option that the script declares, --local-rank=N or "
    "--local_rank=N. If the script declares neither, the rank is only in LOCAL_RANK."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="Pass the local rank only in LOCAL_RANK, not as an argument.",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags = read_flags(arguments)
    program = torchrun_program(flags)
    check_program(program)
    messages = describe_ignored_options(flags)
    if not flags.use_env:
        if program.kind == "command":
            raise ConfigError(
                expected="--use-env with --no-python: Rankless can only read how a Python script takes its rank",
                found="--no-python without --use-env",
                fix="add --use-env, and read LOCAL_RANK",
            )
        way = find_rank_option(program)
        messages += [way.note] if way.note else []
        if way.option is not None:
            rank_argument = f"{way.option}={LOCAL_RANK}"
            program = msgspec.structs.replace(program, arguments=(rank_argument, *program.arguments))
    return run_program(NAME, flags, program, messages)
