"""The doctor's records: the result of a check, and the messages of its collective test.

Each host has a process for that test. It gets and sends these messages as lines of JSON after a mark.
"""

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


MARK = b"rankless: "
"""Precedes our lines on standard output, where Gloo and a login shell write too."""


class CheckTorch(msgspec.Struct, frozen=True, kw_only=True, tag="are you there"):
    """To each process: answer once torch is imported."""


class TorchImported(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """Torch is imported."""


class ServeStore(msgspec.Struct, frozen=True, kw_only=True, tag="open store"):
    """To host 0's process: serve the store that all processes use."""

    address: str


class StoreServedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="store opened"):
    """The store listens at `port`."""

    port: int


class RunAllReduce(msgspec.Struct, frozen=True, kw_only=True, tag="reduce"):
    """Make a process group with the other hosts and sum tensors with them."""

    address: str
    port: int
    rank: int
    size: int
    interface: str
    timeout_seconds: float


class AllReduceResult(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """The sums are right: the seconds for each size in bytes, torch's version, and the number of CUDA devices."""

    join_seconds: float
    seconds: dict[int, float]
    torch: str
    cuda_devices: int


class AllReduceFailed(msgspec.Struct, frozen=True, kw_only=True, tag="not reduced"):
    """The error of a test that failed."""

    text: str


CollectiveTestTask = CheckTorch | ServeStore | RunAllReduce
CollectiveTestResult = TorchImported | StoreServedMessage | AllReduceResult | AllReduceFailed
