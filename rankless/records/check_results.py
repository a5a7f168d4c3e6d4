"""What a check of a host, or of the way between two, has seen."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Status = Literal["pass", "warn", "fail"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one check saw."""

    name: str
    place: str = ""
    """The host, or "a → b" for a pair, or "all"."""
    status: Status
    seen: str
    fix: str = ""


def make_pass(name: str, seen: str) -> CheckResult:
    """A row of a check that found nothing wrong."""
    return CheckResult(name=name, status="pass", seen=seen)


def make_warning(name: str, seen: str, fix: str) -> CheckResult:
    """A row of something that a job may survive."""
    return CheckResult(name=name, status="warn", seen=seen, fix=fix)


def make_failure(name: str, seen: str, fix: str) -> CheckResult:
    """A row of something that a job will not survive."""
    return CheckResult(name=name, status="fail", seen=seen, fix=fix)


def with_place(results: Sequence[CheckResult], place: str) -> list[CheckResult]:
    """The rows, all of one place."""
    return [msgspec.structs.replace(result, place=place) for result in results]
