"""Describes in a line what happened to a rank that failed after the root cause. Its log file has the whole text."""

import re

import msgspec

from rankless.launch.supervisor.failure_attribution import first_line, has_lost_server, is_secondary_failure
from rankless.launch.watchdog.stack_classifier import find_script_folder, format_line
from rankless.launch.watchdog.stacks import Frame
from rankless.launch.watchdog.timed_out_collectives import parse_timeout
from rankless.records.events import Raised
from rankless.user_code import is_library

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


class SecondaryFailure(msgspec.Struct, frozen=True):
    """A rank that failed after another one, and what happened to it, like "lost its connection to another rank"."""

    rank: int
    text: str


def describe_secondary_failure(record: Raised) -> SecondaryFailure:
    """Describe a rank's exception without the texts of the libraries that lost the connection."""
    line = find_script_line(record.traceback)
    at = f" at {line}" if line else ""
    timeout = parse_timeout(record)
    if timeout is not None:
        text = f"waited in {timeout.doing}{at} until its timeout of {timeout.idle_seconds:g} s"
    elif has_lost_server(record):
        text = f"lost its connection to a server{at}"
    elif is_secondary_failure(record):
        text = f"lost its connection to another rank{at}"
    else:
        text = f"raised {first_line(record)}{at}"
    return SecondaryFailure(record.rank, text)


def find_script_line(traceback: str) -> str:
    """Return the innermost line of the script in a traceback, like "train.py:33", or "" if there is none."""
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(traceback)]
    own = [frame for frame in frames if not is_library(frame.file)]
    return format_line(own[-1], find_script_folder(own)) if own else ""
