"""The user's program on a command line: a script, `-m module` or `-c code`, with its own arguments."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankless.config.backends import BACKENDS
from rankless.config.run_config import Program, ProgramKind
from rankless.errors import ConfigError

PLAN_HELP = (
    "Run by the parallel plan in this file, which rankless plan --save has written. One for another script or number "
    "of workers is refused. Default: each job makes its own."
)


class _TakeRemainder(argparse.Action):
    """Takes `-m NAME …` or `-c CODE …` with all arguments after it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        kind: ProgramKind = "module" if option_string == "-m" else "code"
        if not values:
            parser.error(f"argument {option_string}: expected the {kind} to run")
        namespace.program = (kind, *values)


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses the backend of a run's process group."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="Backend of the default process group. Default: RANKLESS_BACKEND, else shared_memory for workers on the "
        "CPU of one host, hierarchical for workers on the CPU of several, nccl for workers with a GPU each, and gloo "
        "for others.",
    )


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Add the program to `parser`; all options after it belong to the program."""
    parser.set_defaults(program=None)
    parser.add_argument(
        "-m",
        nargs=argparse.REMAINDER,
        action=_TakeRemainder,
        metavar="MODULE",
        help="Module to run, with its arguments.",
    )
    parser.add_argument(
        "-c", nargs=argparse.REMAINDER, action=_TakeRemainder, metavar="CODE", help="Code to run, with its arguments."
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="script.py [args]", help="Script to run, with its arguments."
    )


def read_program(arguments: argparse.Namespace) -> Program:
    """Return the program on the command line.

    Raises:
        ConfigError: If the command line names none.
    """
    if arguments.program is not None:
        kind, target, *rest = arguments.program
        return Program(kind=kind, target=target, arguments=tuple(rest))
    if not arguments.script:
        raise ConfigError(
            expected="a script to run", found="none", fix="name one, for example `rankless run -n 2 train.py`"
        )
    return Program(kind="script", target=arguments.script[0], arguments=tuple(arguments.script[1:]))


def find_misplaced_count(program: Program) -> str | None:
    """Return a hint if `-n N` stands after the script, so that the script receives it; None if it has such an option.

    A script that has the option names it, in quotes, in its text.
    """
    given = " ".join(program.arguments)
    found = re.search(r"(?<!\S)-n[ =]?(\d+)(?!\S)", given)
    if program.kind != "script" or found is None:
        return None
    try:
        text = Path(program.target).read_text(errors="replace")
    except OSError:
        return None
    if re.search(r"""["']-n["'=]""", text):
        return None
    return (
        f"{program.target} receives {found[0]!r}, and one worker starts: options of rankless run stand before the "
        f"script, as in `rankless run -n {found[1]} {program.target}`"
    )
