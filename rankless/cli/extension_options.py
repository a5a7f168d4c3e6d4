"""Options of `rankless run`, `plan` and `verify` that extensions declare. Parsing imports no module of theirs."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rankless.config.extensions import list_extensions

_TYPES: Mapping[str, Callable[[str], Any]] = {"text": str, "int": int, "float": float}


def add_extension_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all extensions to `parser`, a group for each.

    Leaves out an option that Rankless or another extension has: a package must not keep commands from working.
    """
    for extension in list_extensions():
        group = parser.add_argument_group(extension.name) if extension.options else None
        for name, option in extension.options.items():
            assert group is not None
            if f"--{name}" in parser._option_string_actions:
                print(f"rankless: the extension {extension.name} has no --{name}: it exists already", file=sys.stderr)
                continue
            dest = _destination(extension.name, name)
            if option.type == "flag":
                group.add_argument(f"--{name}", dest=dest, action="store_true", default=None, help=option.help)
            else:
                group.add_argument(
                    f"--{name}", dest=dest, type=_TYPES[option.type], metavar=option.metavar, help=option.help
                )


def read_extension_options(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the options that the user gives, by the name of the extension; no item for one without."""
    given = vars(arguments)
    if not any(name.startswith(_PREFIX) for name in given):
        return {}
    found = {
        extension.name: {
            name: given[_destination(extension.name, name)]
            for name in extension.options
            if given.get(_destination(extension.name, name)) is not None
        }
        for extension in list_extensions()
    }
    return {name: options for name, options in found.items() if options}


_PREFIX = "option of "


def _destination(extension: str, name: str) -> str:
    return f"{_PREFIX}{extension}: {name}"
