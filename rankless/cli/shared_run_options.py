"""The user's program on a command line: a script, `-m module` or `-c code`, with its own arguments."""

import argparse
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rankless.config.backend_and_fault_tolerance import BACKENDS
from rankless.config.mesh_option import count_workers
from rankless.config.run_config import PlanFile, Program, ProgramKind
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


def add_view_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how several workers run a script without jobs."""
    view = parser.add_mutually_exclusive_group()
    view.add_argument(
        "--logical",
        dest="view",
        action="store_const",
        const="logical",
        default="auto",
        help="Run the script as one training: it sees one process, and its batches are divided between the workers. "
        "Default: for a script of PyTorch that knows no ranks.",
    )
    view.add_argument(
        "--separate",
        dest="view",
        action="store_const",
        const="separate",
        help="Run a copy of the script on each worker, which sees its rank. Default: for all other scripts.",
    )
    parser.add_argument(
        "--zero",
        metavar="optimizer|gradients",
        help="Shard the optimizer state, or also the gradients between backward and step, across the workers of a "
        "script that knows no ranks (ZeRO stage 1 or 2). Default: every worker holds all of them.",
    )


def add_copies_option(parser: argparse._ActionsContainer) -> None:
    """Add the option that keeps copies of what one process alone has of the training's state."""
    parser.add_argument(
        "--copies",
        type=int,
        default=0,
        metavar="N",
        help="1 for a copy of what one worker alone has of the states of jobs with zero=, and of each server, on "
        "another host if there are several. The run then continues without the one that is lost. Default: 0.",
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


def count_default_workers(arguments: argparse.Namespace, *, otherwise: int) -> int:
    """Return the number of workers of a run on one host whose command line names none: that of its mesh or plan.

    Args:
        arguments: The parsed command line.
        otherwise: Their number without a mesh or a plan.

    Raises:
        ConfigError: The plan file has no plan.
    """
    if arguments.mesh:
        return count_workers(arguments.mesh)
    return otherwise if arguments.plan is None else int(_load_plan_files().load_plan(arguments.plan)[0].workers)


def read_plan_file(arguments: argparse.Namespace, program: Program, *, workers: int) -> PlanFile | None:
    """Return the plan file that a command line names; None if it names none.

    Raises:
        ConfigError: The file has no plan for this program and so many workers.
    """
    if arguments.plan is None:
        return None
    file: PlanFile = _load_plan_files().find_plan(arguments.plan, program, workers=workers)
    return file


def _load_plan_files() -> ModuleType:
    # Imported here: few command lines name a plan.
    return importlib.import_module("rankless.config.plan_file")
