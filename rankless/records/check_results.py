"""Results of the doctor's checks, of a host or of a pair of hosts."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Status = Literal["pass", "warn", "fail"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one check saw."""

    name: str
    """The name of the check, such as "open files"."""
    place: str = ""
    """The host, "a → b" for a pair, or "all hosts"."""
    status: Status
    seen: str
    """What the check saw, in one line."""
    fix: str = ""
    """What the user can do; empty if the check passed."""


def make_pass(name: str, seen: str) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult(name=name, status="pass", seen=seen)


def make_warning(name: str, seen: str, fix: str) -> CheckResult:
    """Return a result for something that a job may survive."""
    return CheckResult(name=name, status="warn", seen=seen, fix=fix)


def make_failure(name: str, seen: str, fix: str) -> CheckResult:
    """Return a result for something that makes a job fail."""
    return CheckResult(name=name, status="fail", seen=seen, fix=fix)


def with_place(results: Sequence[CheckResult], place: str) -> list[CheckResult]:
    """Return the results with `place` set."""
    return [msgspec.structs.replace(result, place=place) for result in results]
