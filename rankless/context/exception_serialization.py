"""An exception of one rank as data, and as the same exception on the other ranks. Nothing is unpickled."""

import builtins
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from rankless.errors import RanklessError

_OF_ANOTHER_RANK = re.compile(r"rank \d+ (raised|failed)\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
Plain = str | int | float | bool | None


class RaisedError(msgspec.Struct, frozen=True):
    """An exception that a rank has raised."""

    classes: list[tuple[str, str]]
    """Module and name of its class, and of each base class up to `Exception`."""
    text: str
    arguments: list[Plain]
    attributes: dict[str, Plain] = {}
    fields: list[str | None] = []
    """Of a `RanklessError`: what was expected and found, the fix, and the line."""

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.classes[0][1]

    @property
    def first_line(self) -> str:
        """Its class and the first line of its text."""
        if self.fields:
            return f"{self.name}: {self.fields[1]}"
        return f"{self.name}: {self.text.strip().splitlines()[0]}" if self.text.strip() else self.name

    def is_like(self, other: "RaisedError") -> bool:
        """Return whether another one says the same, up to addresses of objects."""
        same = _ADDRESS.sub("", self.text) == _ADDRESS.sub("", other.text)
        return self.classes[0] == other.classes[0] and same


def describe_error(error: Exception) -> RaisedError:
    """Return an exception as data."""
    classes = [(each.__module__, each.__qualname__) for each in type(error).__mro__]
    given = (error.errno, error.strerror, error.filename) if isinstance(error, OSError) else error.args
    arguments = [each for each in given if _is_plain(each)]
    fields: list[str | None] = []
    if isinstance(error, RanklessError):
        fields = [str(error.expected), str(error.found), error.fix, error.where]
    return RaisedError(
        classes=classes[: classes.index(("builtins", "Exception")) + 1],
        text=_format(error),
        arguments=arguments if len(arguments) == len(given) else [],
        attributes={name: value for name, value in vars(error).items() if _is_plain(value)},
        fields=fields,
    )


def make_same_error(described: RaisedError, *, rank: int) -> Exception:
    """Return the exception of another rank: of the same class where this process has it, with the same text.

    Args:
        described: The exception.
        rank: The rank that has raised it.
    """
    for module, name in described.classes:
        error = _make(_find_class(module, name), described)
        if error is not None:
            break
    else:
        error = RuntimeError(described.text)
    error.add_note(f"Rank {rank} raised it in this call. No rank has finished the call.")
    return error


def is_of_another_rank(error: BaseException, before: BaseException | None = None) -> bool:
    """Return whether a rank raises an error only because another rank has raised one.

    Args:
        error: What the rank raises.
        before: The exception that it was handling when the operation began, whose causes do not count.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and current is not before and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, RanklessError) and _OF_ANOTHER_RANK.match(str(current.found)):
            return True
        current = current.__cause__ or current.__context__
    return False


def _make(found: type[Exception] | None, described: RaisedError) -> Exception | None:
    """Return an error of a class with the text that was described; None if the class cannot have it."""
    if found is None:
        return None
    attempts: Sequence[Any] = (
        lambda: _make_rankless(found, described.fields),
        lambda: found(*described.arguments),
        lambda: _make_unfinished(found, described),
    )
    for attempt in attempts:
        try:
            error = attempt()
            if error is not None and _format(error) == described.text:
                return cast(Exception, error)
        except Exception:  # a class of the script may raise anything
            continue
    return None


def _make_rankless(found: type[Exception], fields: Sequence[str | None]) -> Exception | None:
    if not fields or not issubclass(found, RanklessError):
        return None
    expected, what, fix, where = fields
    return found(expected=expected, found=what, fix=fix or "", where=where)


def _make_unfinished(found: type[Exception], described: RaisedError) -> Exception:
    """Return an error whose class takes other arguments than the error has kept."""
    error = found.__new__(found)
    error.args = (described.text,)
    vars(error).update(described.attributes)
    return error


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (str, int, float, bool)


def _find_class(module: str, name: str) -> type[Exception] | None:
    found: Any = builtins if module == "builtins" else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _format(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # the text of an error of the script may raise anything
        return type(error).__name__
