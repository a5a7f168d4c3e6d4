"""The options of another launcher's command line, in all their spellings."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

Flags = TypeVar("Flags", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option, accepted with `-` and with `_` between its words."""

    name: str
    help: str
    kind: Callable[[str], object] | None = str
    """Converts its text to a value; None for a switch."""
    metavar: str | None = None
    short: str | None = None
    choices: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    """Other names of the option."""
    in_environment: bool = True
    """Whether an environment variable gives its default."""

    @property
    def dest(self) -> str:
        """The field of the flags that it sets."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """All spellings of the option."""
        names = (form for name in (self.name, *self.also) for form in (name, name.replace("-", "_")))
        return [*([self.short] if self.short else []), *dict.fromkeys(f"--{name}" for name in names)]

    def declare(self, parser: argparse.ArgumentParser, *, default: str | None) -> None:
        """Add it to `parser`, as an option with a value."""
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
    """Let the script, module or command with its own arguments follow the options."""
    parser.usage = "%(prog)s [options] script.py [args]"
    parser.add_argument(
        "training_script",
        nargs=argparse.REMAINDER,
        metavar="script.py [args]",
        help="Script to run, with its arguments.",
    )


def parse_flags(arguments: argparse.Namespace, kind: type[Flags]) -> Flags:
    """Return the parsed options as flags of that kind."""
    values = vars(arguments)
    script = values.pop("training_script")
    if script[:1] == ["--"]:
        script = script[1:]
    return msgspec.convert({**values, "training_script": tuple(script)}, kind)
