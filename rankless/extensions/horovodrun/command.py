"""`rankless horovodrun`: the command line of horovodrun."""

import argparse
import sys

from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import RunConfig, decode_settings
from rankless.extensions.horovodrun.build_table import HOROVOD_VERSION, build_table
from rankless.extensions.horovodrun.parser import (
    HorovodrunFlags,
    add_flags,
    complete_flags,
    read_config,
    read_flags,
    unknown_keys,
)
from rankless.extensions.horovodrun.run_config import describe_ignored_options, horovodrun_program, horovodrun_request
from rankless.extensions.horovodrun.settings import HorovodrunSettings
from rankless.launch import agent
from rankless.runtime.hooks.import_aliases import installed_package
from rankless.terminal.lazy_progress_display import ProgressObserver

NAME = "horovodrun"
HELP = (
    "Run a program written for Horovod, with horovodrun's options: a command such as `python train.py`, in -np "
    "processes. The terminal shows all output, each line with its rank. Workers have no standard input."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "-v",
        "--version",
        action="version",
        version=HOROVOD_VERSION,
        help="Show the version of Horovod whose API Rankless implements.",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags, messages = apply_config_file(read_flags(arguments))
    if flags.check_build:
        print(build_table())
        return 0
    real = installed_package("horovod")
    program = horovodrun_program(flags)
    config = make_run_config(program, horovodrun_request(flags, program))
    messages += describe_ignored_options(flags)
    if real is not None:
        messages.append(f"`import horovod` imports the installed one, {real}; RANKLESS_HOROVOD=1 selects Rankless's")
        if config.request.elastic is not None:
            messages.append("the installed one finds no elastic job here: each of its processes would train alone")
    messages += describe_run(config) if flags.verbose else []
    sys.stderr.writelines(f"rankless horovodrun: {note}\n" for note in messages)
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


def apply_config_file(flags: HorovodrunFlags) -> tuple[HorovodrunFlags, list[str]]:
    """Complete the flags from the config file that they name; return notices about its unknown keys too."""
    path = flags.config_file
    if path is None:
        return flags, []
    settings = read_config(path)
    return complete_flags(flags, settings, path=path), [
        f"{path}: {key}: unknown key, ignored" for key in unknown_keys(settings)
    ]


def describe_run(config: RunConfig) -> list[str]:
    """Return the lines that `--verbose` prints."""
    assert config.request.launcher is not None
    settings = decode_settings(config.request.launcher.settings, HorovodrunSettings)
    program = config.program
    hosts = ", ".join(f"{host.name}:{host.slots}" for host in settings.hosts)
    lines = [f"slots: {hosts}", f"program: {program.kind} {program.target} {' '.join(program.arguments)}".rstrip()]
    return lines + [f"variable: {name}={value}" for name, value in settings.variables]
