"""Options of `rankless run`, `plan` and `verify` that extensions declare. Parsing imports no module of theirs."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankless.config.extensions import Extension, find_extension, list_installed, list_own

_PREFIX = "option of "
"""Begins the names under which the values are parsed, so that no option of a command has one of them."""
_TYPES: Mapping[str, Callable[[str], Any]] = {"text": str, "int": int, "float": float}


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the extensions that come with Rankless to `parser`, a group for each."""
    _add_options(parser, list_own())


def add_installed_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the extensions of other packages to `parser`, a group for each.

    Leaves out an option that Rankless or another extension has: a package must not keep commands from working.
    """
    _add_options(parser, list_installed())


def _add_options(parser: argparse.ArgumentParser, extensions: Iterable[Extension]) -> None:
    for extension in extensions:
        group = parser.add_argument_group(extension.options_title or extension.name) if extension.options else None
        for name, option in extension.options.items():
            assert group is not None
            if f"--{name}" in parser._option_string_actions:
                print(f"rankless: the extension {extension.name} has no --{name}: it exists already", file=sys.stderr)
                continue
            dest = f"{_PREFIX}{extension.name}: {name}"
            if option.type == "flag":
                group.add_argument(f"--{name}", dest=dest, action="store_true", default=None, help=option.help)
            else:
                group.add_argument(
                    f"--{name}", dest=dest, type=_TYPES[option.type], metavar=option.metavar, help=option.help
                )


def find_given_options(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the options that the user gives, by the name of the extension; no item for one without."""
    found: dict[str, dict[str, Any]] = {}
    for dest, value in vars(arguments).items():
        if dest.startswith(_PREFIX) and value is not None:
            extension, _, name = dest.removeprefix(_PREFIX).partition(": ")
            found.setdefault(extension, {})[name] = value
    for extension, given in found.items():
        known = find_extension(extension)
        given |= {name: getattr(arguments, name) for name in (known.shared_options if known is not None else ())}
    return found
