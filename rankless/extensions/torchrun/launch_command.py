"""`rankless launch`: the command line of `python -m torch.distributed.launch`.

Which option gives a script its local rank: `python -m torch.distributed.launch` passes it as an argument.

Note [the spelling that the script declares]: torch passes `--local-rank=N` since 2.0, `--local_rank=N` before, to
every script. A script that declares the other spelling, or neither, fails. So Rankless reads the script's source and
the files beside it that it imports, and passes the spelling that they declare with one of the usual parsers.
"""

import argparse
import ast
import os
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from rankless.config.make_run_config import check_program
from rankless.config.program_source_files import own_syntax, program_file
from rankless.config.run_config import Program
from rankless.errors import ConfigError
from rankless.extensions.torchrun.command import run_program
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


RankOption = Literal["--local-rank", "--local_rank"]

_DECLARED = re.compile(r"--local([-_])rank(?![\w-])")
_TEXTS = ("help", "description", "epilog", "usage", "metavar")
"""Keywords whose values are texts for people."""
_PARSERS = frozenset(
    (
        *("absl", "argparse", "cleo", "click", "docopt", "fire", "getopt", "hydra", "jsonargparse", "optparse"),
        *("plac", "simple_parsing", "tap", "transformers", "typer", "tyro", "configargparse", "cyclopts"),
    )
)
_BY_PARAMETER = frozenset(("cyclopts", "fire", "typer"))
"""Parsers that make `--local-rank` from a function's parameter `local_rank`."""
_BY_FIELD = frozenset(("jsonargparse", "simple_parsing", "tap", "transformers", "tyro"))
"""Parsers that make `--local_rank` from a class's field `local_rank`."""
_OPTION_OBJECTS = frozenset(
    ("args", "arguments", "cfg", "config", "flags", "hparams", "opt", "options", "opts", "params")
)


class RankOptionChoice(msgspec.Struct, frozen=True):
    """The option to pass, or None, and a note for the user, or ""."""

    option: RankOption | None
    note: str = ""


def find_rank_option(program: Program) -> RankOptionChoice:
    """Return the option that passes the local rank to `program`."""
    if program_file(program) is None:
        return RankOptionChoice(
            "--local-rank", "the source cannot be read, so the rank is passed as torch does, --local-rank=N"
        )
    name = os.path.basename(program.target)
    trees = list(own_syntax(program))
    if not trees:
        return RankOptionChoice("--local-rank")  # it does not parse, and Python will say so
    # An option that is written out takes precedence over the name of a parameter.
    found = {option for tree in trees for option in _declared(tree)}
    found = found or {option for tree in trees for option in _declared_by_name(tree)}
    if found:
        return RankOptionChoice("--local-rank" if "--local-rank" in found else "--local_rank")
    if any(_reads_rank_of_options(tree) for tree in trees) and not any(_sets_rank(tree) for tree in trees):
        return RankOptionChoice(
            "--local-rank",
            f"{name} reads local_rank from its options and declares it out of sight: "
            "the rank is passed as torch does, --local-rank=N",
        )
    if any(_takes_arguments(tree) for tree in trees):
        return RankOptionChoice(None, f"{name} declares no --local-rank, so none is passed; LOCAL_RANK is set")
    return RankOptionChoice(None)


def _declared(tree: ast.Module) -> Iterator[RankOption]:
    imported = _imported(tree)
    for text in _texts_for_programs(tree):
        option = _DECLARED.match(text.strip())
        if option is not None:
            yield "--local-rank" if option[1] == "-" else "--local_rank"
        elif "getopt" in imported and text.rstrip("=") in ("local-rank", "local_rank"):
            yield "--local-rank" if "-" in text else "--local_rank"
    if "docopt" in imported:
        for usage in _DECLARED.finditer(ast.get_docstring(tree) or ""):
            yield "--local-rank" if usage[1] == "-" else "--local_rank"


def _declared_by_name(tree: ast.Module) -> Iterator[RankOption]:
    """Yield options declared without dashes: absl's, fields of classes, parameters of functions."""
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith("DEFINE_"):
            if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "local_rank":
                yield "--local_rank"
        elif isinstance(node, ast.ClassDef) and imported & _BY_FIELD:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "local_rank":
                    yield "--local_rank"
        elif isinstance(node, ast.FunctionDef) and imported & _BY_PARAMETER:
            parameters = (*node.args.args, *node.args.kwonlyargs)
            if any(parameter.arg == "local_rank" for parameter in parameters):
                yield "--local-rank"


def _texts_for_programs(tree: ast.Module) -> Iterator[str]:
    """Yield every string except docstrings, help texts and parts of f-strings."""
    for_people: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            for_people.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            for_people.update(node.values)
        elif isinstance(node, ast.keyword) and node.arg in _TEXTS:
            for_people.update(part for part in ast.walk(node.value) if isinstance(part, ast.expr))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in for_people:
            yield node.value


def _imported(tree: ast.Module) -> set[str]:
    """Return the top-level names of all imported modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _takes_arguments(tree: ast.Module) -> bool:
    reads = any(isinstance(node, ast.Attribute) and node.attr == "argv" for node in ast.walk(tree))
    return reads or bool(_imported(tree) & _PARSERS)


def _reads_rank_of_options(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "local_rank"
        and isinstance(node.value, ast.Name)
        and node.value.id.lower() in _OPTION_OBJECTS
        for node in ast.walk(tree)
    )


def _sets_rank(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "local_rank" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(tree)
    )
