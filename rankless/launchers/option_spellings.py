"""An option of another launcher's command line."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

Flags = TypeVar("Flags", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option; its name is known with `-` and with `_` between the words."""

    name: str
    help: str
    kind: Callable[[str], object] | None = str
    """What makes a value of its text; None for a switch."""
    metavar: str | None = None
    short: str | None = None
    choices: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    """Other names of the same option."""
    in_environment: bool = True
    """Whether a variable of the environment stands in for it."""

    @property
    def dest(self) -> str:
        """Its field of the flags."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """All ways to write it."""
        names = (form for name in (self.name, *self.also) for form in (name, name.replace("-", "_")))
        return [*([self.short] if self.short else []), *dict.fromkeys(f"--{name}" for name in names)]

    def declare(self, parser: argparse.ArgumentParser, *, default: str | None) -> None:
        """Make it an option of `parser` that has a value."""
        assert self.kind is not None
        parser.add_argument(
            *self.spellings,
            dest=self.dest,
            type=self.kind,
            default=default,
            metavar=self.metavar,
            choices=self.choices,
            help=self.help,
        )


def declare_script(parser: argparse.ArgumentParser) -> None:
    """Make what follows the options the script, module or command with its own arguments."""
    parser.usage = "%(prog)s [options] script.py [args]"
    parser.add_argument(
        "training_script",
        nargs=argparse.REMAINDER,
        metavar="script.py [args]",
        help="Script to run, with its arguments.",
    )


def parse_flags(arguments: argparse.Namespace, kind: type[Flags]) -> Flags:
    """What was given, as flags of that kind."""
    values = vars(arguments)
    script = values.pop("training_script")
    if script[:1] == ["--"]:
        script = script[1:]
    return msgspec.convert({**values, "training_script": tuple(script)}, kind)
