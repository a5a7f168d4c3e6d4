"""Describes in a line what happened to a rank that failed after the root cause. Its log file has the whole text."""

import msgspec

from rankless.launch.supervisor.error_lines import find_line, first_line
from rankless.launch.supervisor.failure_attribution import find_lost_process, is_secondary_failure
from rankless.launch.watchdog.timed_out_collectives import parse_timeout
from rankless.records.events import Raised


class SecondaryFailure(msgspec.Struct, frozen=True):
    """A rank that failed after another one, and what happened to it, like "lost its connection to another rank"."""

    rank: int
    text: str


def describe_secondary_failure(record: Raised) -> SecondaryFailure:
    """Describe a rank's exception without the texts of the libraries that lost the connection."""
    line = find_line(record)
    at = f" at {line}" if line else ""
    timeout = parse_timeout(record)
    if timeout is not None:
        text = f"waited in {timeout.doing}{at} until its timeout of {timeout.idle_seconds:g} s"
    elif (lost := find_lost_process(record)) is not None:
        text = f"lost its connection to a {lost[0]}{at}"
    elif is_secondary_failure(record):
        text = f"lost its connection to another rank{at}"
    else:
        text = f"raised {first_line(record)}{at}"
    return SecondaryFailure(record.rank, text)
