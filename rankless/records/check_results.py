"""What a check of a host, or of the way between two, has seen."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Status = Literal["pass", "warn", "fail"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one check saw."""

    name: str
    place: str = ""
    """The host, or "a → b" for a pair, or "all"."""
    status: Status
    seen: str
    fix: str = ""


def passed(name: str, seen: str) -> Row:
    """A row of a check that found nothing wrong."""
    return Row(name=name, status="pass", seen=seen)


def warned(name: str, seen: str, fix: str) -> Row:
    """A row of something that a job may survive."""
    return Row(name=name, status="warn", seen=seen, fix=fix)


def failed(name: str, seen: str, fix: str) -> Row:
    """A row of something that a job will not survive."""
    return Row(name=name, status="fail", seen=seen, fix=fix)


def placed(rows: Sequence[Row], place: str) -> list[Row]:
    """The rows, all of one place."""
    return [msgspec.structs.replace(row, place=place) for row in rows]
