"""The option `--json` of all commands: where a result goes as JSON, and the fields that all results share.

A result is one JSON object. It starts with the fields of `JsonHeader`, and the command's own fields follow.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rankless.config.run_config import Program
from rankless.errors import ConfigError
from rankless.records import encoding
from rankless.version import VERSION

STANDARD_OUTPUT = "-"


class JsonHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first fields of every result. Fields may be added; `version` grows if one changes its meaning."""

    version: Literal[1]
    """The version of the layout."""
    rankless: str
    """The version of Rankless."""
    command: str
    script: str | None
    """The program as on the command line: "train.py", "-m package.train" or "-c CODE". Null without a program."""
    arguments: tuple[str, ...]
    """The arguments of the program."""
    seed: int | None
    """The seed of the random generators of all workers. Null without one."""


@dataclass(frozen=True, kw_only=True)
class JsonDestination:
    """Where a command writes its result as JSON: a file, standard output (`-`), or nowhere (None)."""

    path: str | None

    @property
    def is_standard_output(self) -> bool:
        """Whether standard output is for the JSON alone."""
        return self.path == STANDARD_OUTPUT

    @contextlib.contextmanager
    def reserve_standard_output(self) -> Iterator[None]:
        """Within the context, text goes to standard error if the JSON goes to standard output."""
        with contextlib.redirect_stdout(sys.stderr) if self.is_standard_output else contextlib.nullcontext():
            yield

    def write(self, header: JsonHeader, content: msgspec.Struct) -> None:
        """Write the result, unless the user asked for none. Call it outside of `reserve_standard_output`."""
        if self.path is None:
            return
        encoded = encode_json(header, content)
        if self.is_standard_output:
            print(encoded.decode(), end="", flush=True)
        else:
            Path(self.path).write_bytes(encoded)


def add_json_option(parser: argparse.ArgumentParser, what: str, *, file_is_optional: bool = False) -> None:
    """Add `--json` to the options of a command.

    Args:
        parser: The command's parser.
        what: The name of the result in the help, as "the plan".
        file_is_optional: Whether `--json` alone prints the JSON. A command that takes a program must leave this
            False: argparse would take the program's name for the file.
    """
    if file_is_optional:
        parser.add_argument(
            "--json",
            nargs="?",
            const=STANDARD_OUTPUT,
            metavar="FILE",
            help=f"Write {what} to this file as JSON. Without FILE or with -: print it as JSON.",
        )
    else:
        parser.add_argument(
            "--json", metavar="FILE", help=f"Write {what} to this file as JSON. With -: print it as JSON."
        )


def read_json_destination(arguments: argparse.Namespace) -> JsonDestination:
    """Return the destination on the command line.

    Raises:
        ConfigError: If the command could not write there at its end, or would overwrite a Python script.
    """
    path: str | None = arguments.json
    if path is None or path == STANDARD_OUTPUT:
        return JsonDestination(path=path)
    if path.endswith(".py"):
        raise ConfigError(
            expected="--json FILE, with the file for the result",
            found=f"{path}, a Python script",
            fix=f"name the file before the script: --json result.json {path}; or print the result: --json - {path}",
        )
    require_writable_file("--json", path)
    return JsonDestination(path=path)


def make_json_header(command: str, program: Program | None = None, *, seed: int | None = None) -> JsonHeader:
    """Return the first fields of a result.

    Args:
        command: The name of the command.
        program: The user's program; None for a command that runs none.
        seed: The seed that the command used.
    """
    script = None if program is None else program.text
    arguments: Sequence[str] = () if program is None else program.arguments
    return JsonHeader(
        version=1, rankless=VERSION, command=command, script=script, arguments=tuple(arguments), seed=seed
    )


def encode_json(header: JsonHeader, content: msgspec.Struct) -> bytes:
    """Return a result as one indented JSON object. A number that is not finite becomes null."""
    return msgspec.json.format(encode_json_line(header, content), indent=2) + b"\n"


def encode_json_line(header: JsonHeader, content: msgspec.Struct) -> bytes:
    """Return a result as one JSON object on one line. A number that is not finite becomes null."""
    fields: dict[str, Any] = msgspec.to_builtins(header)
    own: dict[str, Any] = msgspec.to_builtins(content)
    assert not fields.keys() & own.keys(), f"{type(content).__name__} repeats fields of the header"
    return encoding.encode_json(fields | own) + b"\n"


def require_writable_file(option: str, path: str) -> None:
    """Raise `ConfigError` if a command could not write a file that an option names."""
    found = path
    if os.path.isdir(path):
        is_writable = False
    elif os.path.exists(path):
        is_writable = os.access(path, os.W_OK)
    else:
        problem = try_to_create(path)
        is_writable = problem is None
        found = f"{path}: {problem}"
    if not is_writable:
        raise ConfigError(
            expected=f"{option} FILE in an existing folder, with permission to write",
            found=found,
            fix="create the folder, or choose another file",
        )


def try_to_create(path: str) -> str | None:
    """Create a file and remove it again; return why that fails, or None.

    Permissions do not say all: a name may be too long, or a file system may take no files.
    """
    try:
        Path(os.path.realpath(path)).touch(exist_ok=False)
    except OSError as error:
        return error.strerror
    os.unlink(os.path.realpath(path))
    return None


def require_different_files(files: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` if two options name one file, of which the second would overwrite the first."""
    named: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(
                expected="a file of its own for each result",
                found=f"{path} for {other} and {option}",
                fix="name another file",
            )
