"""`rankless completion`: the code with which bash, zsh and fish complete command lines, and the answers to a shell."""

import argparse

import argcomplete
from argcomplete.shell_integration import shellcode

from rankless.cli import make_main_parser, summarize_commands

NAME = "completion"
HELP = (
    "Print the code with which a shell completes the command lines of rankless. In ~/.bashrc or ~/.zshrc: "
    'eval "$(rankless completion bash)", or zsh; in ~/.config/fish/config.fish: rankless completion fish | source.'
)
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("shell", choices=SHELLS, help="Shell for which to print the code.")


def run(arguments: argparse.Namespace) -> int:
    """Print the code and return the exit code."""
    print(shellcode(["rankless"], shell=arguments.shell))
    return 0


def answer_shell(line: str) -> None:
    """Print what may follow on the command line that a shell is completing, and end this process.

    The shell calls `rankless` for each completion, so this imports no command but the one on the line.
    """
    words = line.split()
    command = words[1] if len(words) > 1 and words[1] in summarize_commands() else None
    argcomplete.autocomplete(make_main_parser(command))
