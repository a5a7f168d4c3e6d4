"""An option of another launcher's command line."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


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
