"""`rankless horovodrun`: horovodrun's command line, word for word."""

import argparse
import sys

from rankless.cli.horovodrun_flags import add_flags, take_flags
from rankless.cli.progress_line import ProgressLine
from rankless.compat.horovod import __version__ as horovod_version
from rankless.launch import agent
from rankless.launch.build_table import build_table
from rankless.plan.check import make_run_plan
from rankless.plan.horovodrun import horovodrun_program, horovodrun_request, notes
from rankless.plan.horovodrun_config import completed, read_config, unknown_keys
from rankless.plan.horovodrun_flags import HorovodrunFlags
from rankless.plan.run_plan import RunPlan
from rankless.runtime.import_names import installed_horovod

NAME = "horovodrun"
HELP = (
    "Run a program that was written for Horovod, with horovodrun's options: a command, most often `python train.py`, "
    "as many times as -np says. All output is shown, each line with its rank. Workers have no standard input."
)
ABBREVIATES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("-v", "--version", action="version", version=horovod_version, help="whose API this is")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    flags, said = with_config(take_flags(arguments))
    if flags.check_build:
        print(build_table(horovod_version))
        return 0
    real = installed_horovod()
    program = horovodrun_program(flags)
    plan = make_run_plan(program, horovodrun_request(flags, program))
    said += notes(flags)
    if real is not None:
        said.append(f"`import horovod` is the one installed, {real}; RANKLESS_HOROVOD=1 takes Rankless's")
        if plan.elastic is not None:
            said.append("that one finds no elastic job here: each of its processes would be alone")
    said += given_to_workers(plan) if flags.verbose else []
    sys.stderr.writelines(f"rankless horovodrun: {note}\n" for note in said)
    sys.stderr.flush()
    with ProgressLine() as line:
        return agent.run(plan, on_record=line.take, out=sys.stdout, err=sys.stderr, making_room=line.making_room)


def with_config(flags: HorovodrunFlags) -> tuple[HorovodrunFlags, list[str]]:
    """The flags completed by the file that they name, and what is to be said of it."""
    path = flags.config_file
    if path is None:
        return flags, []
    config = read_config(path)
    return completed(flags, config, path=path), [f"{path}: {key}: unknown, not heeded" for key in unknown_keys(config)]


def given_to_workers(plan: RunPlan) -> list[str]:
    """What `--verbose` tells."""
    assert plan.horovod is not None
    program = plan.program
    hosts = ", ".join(f"{host.name}:{host.slots}" for host in plan.horovod.hosts)
    lines = [f"slots: {hosts}", f"program: {program.kind} {program.target} {' '.join(program.arguments)}".rstrip()]
    return lines + [f"variable: {name}={value}" for name, value in plan.horovod.variables]
