"""`rankless status`: show the runs of this user that are in progress on this host, or one run."""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankless.cli.json_output import JsonHeader, encode_json_line
from rankless.config.environment import default_log_folder
from rankless.errors import ConfigError
from rankless.launch.status.build_status import report_gone, report_running
from rankless.launch.status.read_counters import RunReading, read_run
from rankless.launch.status.run_lookup import FoundRuns, find_named_run, find_running_runs
from rankless.records.live_run import LiveRun
from rankless.records.run_status import RunStatus
from rankless.terminal.status_table import format_status
from rankless.version import VERSION

NAME = "status"
JSON_CONTENT = RunStatus
HELP = (
    "List this user's runs in progress on this host, with the state and the speed of each "
    "worker and server. It does not disturb them. Exit code: 0 for a known run, also for one that has ended; "
    "2 for an unknown RUN."
)
READING_SECONDS = 0.5
"""Between the two readings that rates need."""
DEFAULT_WATCH_SECONDS = 2.0
SHORTEST_WATCH_SECONDS = 0.1
_CLEAR = "\x1b[H\x1b[2J"
_NONE = "this user has no run in progress on this host (elastic jobs, and processes of rankless.spawn, are not shown)\n"


_RunKey = tuple[str, int]
"""A run's id, and the process id of its agent: simulated hosts of one run have several."""


class _ShownRun(NamedTuple):
    script: str | None
    arguments: tuple[str, ...]
    seed: int | None
    status: RunStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="Run to show, also one that has ended: its id, its log folder such as log/latest, or its run.json. "
        "Default: all runs in progress.",
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON for each run.")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=str(DEFAULT_WATCH_SECONDS),
        metavar="SECONDS",
        help="Show it again every SECONDS, until RUN has ended or until Ctrl-C. Default of SECONDS: 2.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the status, once or again and again."""
    name, interval = _read_arguments(arguments)
    if sys.platform != "linux":
        raise ConfigError(
            expected="Linux, where agents share what they know", found=sys.platform, fix="read run.json and the logs"
        )
    clears = interval is not None and not arguments.json and sys.stdout.isatty()
    before: dict[_RunKey, RunReading] = {}
    while True:
        shown, after = _take_status(name, before)
        text = "".join(map(_format_json, shown)) if arguments.json else _format_text(shown)
        print((_CLEAR if clears else "\n" if before and not arguments.json else "") + text, end="", flush=True)
        if interval is None or (name is not None and not after):
            return 0
        before = after
        time.sleep(interval)


def _take_status(
    name: str | None, before: Mapping[_RunKey, RunReading]
) -> tuple[list[_ShownRun], dict[_RunKey, RunReading]]:
    """Return what to show now, and the readings of the runs in progress.

    Args:
        name: The run to show; None for all in progress.
        before: The readings of the last call; without any, this takes two.

    Raises:
        ConfigError: There is no such run, and there was none in the last call.
    """
    found = _find(name, is_known=bool(before))
    if not before and found.running:
        before = _read_all(found.running, with_places=False)
        time.sleep(READING_SECONDS)
        found = _find(name, is_known=True)
    after = _read_all(found.running, with_places=True)
    shown = [
        _ShownRun(each.run.script, each.run.arguments, each.run.seed, report_running(before.get(key), each))
        for key, each in after.items()
    ]
    if found.ended is not None:
        program = found.ended.program
        shown.append(_ShownRun(program.script, program.arguments, program.seed, found.ended.status))
    elif name is not None and not after:  # it has ended meanwhile
        shown = [
            _ShownRun(each.run.script, each.run.arguments, each.run.seed, report_gone(each.run))
            for each in before.values()
        ]
    return shown, after


def _read_arguments(arguments: argparse.Namespace) -> tuple[str | None, float | None]:
    """Return the run and the interval. Without a number after it, `--watch` has left RUN where SECONDS would be."""
    name, watch = arguments.run, arguments.watch
    if watch is None:
        return name, None
    try:
        seconds = float(watch)
    except ValueError:
        if name is None:
            return watch, DEFAULT_WATCH_SECONDS
        seconds = math.nan
    if not SHORTEST_WATCH_SECONDS <= seconds < math.inf:
        raise ConfigError(
            expected=f"--watch with a number of seconds from {SHORTEST_WATCH_SECONDS} on",
            found=repr(watch),
            fix=f"leave the number away to get {DEFAULT_WATCH_SECONDS:g} s",
        )
    return name, seconds


def _find(name: str | None, *, is_known: bool) -> FoundRuns:
    """Return the runs to show. A run that was there and is gone has no error."""
    if name is None:
        return FoundRuns(running=find_running_runs())
    try:
        return find_named_run(name, log_folder=default_log_folder())
    except ConfigError:
        if not is_known:
            raise
        return FoundRuns()


def _read_all(runs: Sequence[LiveRun], *, with_places: bool) -> dict[_RunKey, RunReading]:
    """Return the readings of runs."""
    return {(each.run_id, each.process_id): read_run(each, with_places=with_places) for each in runs}


def _format_text(runs: Sequence[_ShownRun]) -> str:
    texts = [format_status(each.status, script=each.script, arguments=each.arguments) for each in runs]
    return "\n".join(texts) or _NONE


def _format_json(shown: _ShownRun) -> str:
    header = JsonHeader(
        version=1, rankless=VERSION, command=NAME, script=shown.script, arguments=shown.arguments, seed=shown.seed
    )
    return encode_json_line(header, shown.status).decode()
