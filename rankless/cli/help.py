"""`rankless help`: show all commands, or the options of one."""

import argparse

from rankless.cli import make_main_parser, make_parser, summarize_commands

NAME = "help"
HELP = "Show all commands, or the options of one, as its --help does."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "command",
        nargs="?",
        choices=tuple(summarize_commands()),
        metavar="COMMAND",
        help="Command to show. Default: all, in short.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the help and return the exit code."""
    parser = make_main_parser() if arguments.command is None else make_parser(arguments.command)
    parser.print_help()
    return 0
