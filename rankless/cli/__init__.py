"""The command line, one command per file.

The input is the command line, the output an exit code. A command is a module, here or in an extension, with `NAME`,
`HELP`, `add_arguments(parser)` and `run(arguments) -> int`; the command line imports it only if the user calls it.
`TAKES_EXTENSION_OPTIONS` adds the options that extensions of other packages declare, for the help and for a command
line with an unknown option. `ABBREVIATES` allows abbreviated options, for command lines of launchers that allow them.
`JSON_CONTENT` is the type of what the command writes with `--json`.
"""

import argparse
import difflib
import importlib
import os
import select
import shlex
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, TextIO

from rankless.cli.extension_options import add_installed_options
from rankless.config.extensions import find_command, import_declared, list_commands, list_problems
from rankless.errors import RanklessError
from rankless.version import VERSION

COMMANDS = {
    "run": "Run a script on one or more workers, on this host or on several.",
    "status": "List the runs in progress on this host, with the state and the speed of each process.",
    "doctor": "Check for anything that would make a job hang or fail, on this host or between several.",
    "plan": "Show the parallel plan of a script's jobs, and the data that they move in a step.",
    "verify": "Run a script on one worker and on several, and check that both trainings are the same.",
    "checkpoint": "Write the models and tables of a checkpoint into safetensors files.",
    "help": "Show all commands, or the options of one.",
    "completion": "Print the code with which a shell completes the command lines of rankless.",
}
"""The commands of Rankless itself, with what `rankless --help` shows, so that it need not import them."""


_RENAMED_OPTIONS = {
    "--lost-workers": "--lost-workers is now --min-workers N, the number of workers that must be left",
    "--replicas": "--replicas is now --copies N, the number of copies of each server and of workers' states",
    "--copy": "--copy is now --send-script",
}
"""What to tell a user of an earlier version, by the option as it was."""
_COMPLETION = "_ARGCOMPLETE"
"""A shell that completes a command line sets this variable."""


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that suggests the closest known option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            given = unknown.split()[0].partition("=")[0]
            # Compare without the leading dashes, which all options share.
            known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            nearest = difflib.get_close_matches(given.lstrip("-"), known, n=1, cutoff=0.5)
            message = f"unknown option {given}" + (f"; did you mean --{nearest[0]}?" if nearest else "")
            message = _RENAMED_OPTIONS.get(given, message)
        super().error(message)

    def needs_extension_options(self, given: Sequence[str]) -> bool:
        """Return whether a command line asks for help, or has an option before the program that is not known yet."""
        position = 0
        while position < len(given) and given[position].startswith("-") and given[position] not in ("-", "--"):
            option = given[position].partition("=")[0]
            if option in ("-h", "--help") or (option.startswith("--") and option not in self._option_string_actions):
                return True
            position += 1 + (0 if "=" in given[position] else self._count_values(given[position]))
        return False

    def insert_program_separator(self, given: Sequence[str]) -> list[str]:
        """Return the command line with `--` before the program.

        Without it, argparse looks for abbreviations in the program's own options too, and rejects ambiguous ones.
        """
        position = 0
        while position < len(given) and given[position].startswith("-") and given[position] not in ("-", "--"):
            position += 1 + self._count_values(given[position])
        program = list(given[position:])
        return [*given[:position], "--", *program] if program and program[0] != "--" else list(given)

    def _count_values(self, given: str) -> int:
        """Return how many arguments after the option `given` are its values."""
        known = self._option_string_actions
        exact = [known[given]] if given in known else []
        actions = exact or [
            action for option, action in known.items() if given.startswith("--") and option.startswith(given)
        ]
        if not actions:
            return 0
        count = actions[0].nargs
        return count if isinstance(count, int) else 1


BROKEN_PIPE = 128 + signal.SIGPIPE
"""The exit code that a shell reports for a tool whose reader has gone, as in `rankless verify train.py | head -1`."""

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; end quietly if nobody reads its output any more."""
    if arguments is None and _COMPLETION in os.environ:
        _import_command("completion").answer_shell(os.environ.get("COMP_LINE", ""))
    try:
        code = _dispatch(arguments)
    except BrokenPipeError:
        if _have_readers(sys.stdout, sys.stderr):
            raise
        _redirect_to_devnull(sys.stdout, sys.stderr)
        return BROKEN_PIPE
    except KeyboardInterrupt:  # before or after a job: while one runs, the agent receives the signals
        print("rankless: ended by SIGINT", file=sys.stderr)
        return INTERRUPTED
    except SystemExit:  # argparse raises it after printing help
        if _flush():
            raise
        return BROKEN_PIPE
    return code if _flush() else code or BROKEN_PIPE


def _flush() -> bool:
    """Flush standard output and error, and return whether both still have a reader.

    A broken pipe at the exit of the interpreter would print a traceback.
    """
    is_read = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _redirect_to_devnull(stream)
            is_read = False
    return is_read


def _have_readers(*streams: TextIO) -> bool:
    """Return whether no stream is a pipe without a reader."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _redirect_to_devnull(*streams: TextIO) -> None:
    """Redirect the streams, so that what they still write goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _dispatch(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and (given[0] in COMMANDS or find_command(given[0]) is not None):
        return _run_command(given[0], given[1:])
    parser = make_main_parser()
    scripts = [word for word in given if word.endswith(".py")]
    is_option = bool(given) and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")
    if scripts and (is_option or given[0] in scripts):
        parser.error(f"expected a command before {given[0]}: rankless run {shlex.join(given)}")
    if given and not given[0].startswith("-"):
        nearest = difflib.get_close_matches(given[0], summarize_commands(), n=1)
        problems = "".join(f"\n{error}" for error in list_problems())
        parser.error(f"unknown command {given[0]}" + (f"; did you mean {nearest[0]}?" if nearest else "") + problems)
    parser.parse_args(given)
    parser.print_help(sys.stderr)
    return 2


def summarize_commands() -> dict[str, str]:
    """Return all commands by name, those of extensions too, with what `rankless --help` shows."""
    return COMMANDS | {name: command.help for name, command in list_commands().items()}


def make_main_parser(detailed: str | None = None) -> CommandParser:
    """Return the parser of `rankless` with all commands, of which `detailed` has its options too."""
    parser = CommandParser(
        prog="rankless",
        description="Run one training script on one device or on many, with the same results.",
        epilog="`rankless help COMMAND` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"rankless {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, summary in summarize_commands().items():
        command = commands.add_parser(name, help=summary)
        if name == detailed:
            module = _import_command(name)
            module.add_arguments(command)
            if hasattr(module, "TAKES_EXTENSION_OPTIONS"):
                add_installed_options(command)
    return parser


def make_parser(name: str) -> CommandParser:
    """Return the parser of a command by name; `make docs` makes the command reference from it."""
    command = _import_command(name)
    parser = CommandParser(
        prog=f"rankless {name}", description=command.HELP, allow_abbrev=getattr(command, "ABBREVIATES", False)
    )
    command.add_arguments(parser)
    return parser


def _import_command(name: str) -> ModuleType:
    extension = None if name in COMMANDS else find_command(name)
    if extension is None:
        return importlib.import_module(f"rankless.cli.{name}")
    command: ModuleType = import_declared(name, f"commands.{name}.module", extension.module)
    return command


def _run_command(name: str, given: Sequence[str]) -> int:
    try:
        command, parser = _import_command(name), make_parser(name)
        if hasattr(command, "TAKES_EXTENSION_OPTIONS") and parser.needs_extension_options(given):
            add_installed_options(parser)
        if parser.allow_abbrev:
            given = parser.insert_program_separator(given)
        arguments = parser.parse_args(given)
        arguments.command_line = list(given)
        return int(command.run(arguments))
    except RanklessError as error:
        print(f"rankless {name}: {type(error).__name__}{error}", file=sys.stderr)
        return 2
