"""Find the rank that did not arrive when a collective raises the timeout of the script's own process group.

PyTorch raises in the ranks that waited and does not name the missing rank. The watchdog collects the status of all
ranks at once. A rank that waits elsewhere, or does not wait at all, is missing.
"""

import re
from collections.abc import Mapping

from rankless.launch.watchdog.missing_ranks import HangDiagnosis
from rankless.launch.watchdog.stack_classifier import classify_stack
from rankless.launch.watchdog.stacks import Frame
from rankless.records.events import Raised, RankStatus

_TIMED_OUT = re.compile(
    r"(?:Timed out waiting|[Ww]ait timeout after) (?P<milliseconds>\d+) ?ms"
    r"|(?:rank \d+|a rank) did not take part within (?P<seconds>[\d.e+]+) s"
)
"""The messages of Gloo, of the TCP store, and of groups whose ranks reduce in shared memory."""
_TRACEBACK_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def parse_timeout(record: Raised) -> RankStatus | None:
    """Return the status of a rank that a collective's timeout ended; None if the exception has another cause."""
    found = _TIMED_OUT.search(record.traceback)
    if found is None:
        return None
    _, _, trace = record.traceback[: found.start()].rpartition(_TRACEBACK_HEADER)
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(trace)]
    location = classify_stack(frames[::-1]) if frames else None
    if location is None or not location.collective:
        return None
    return RankStatus(
        rank=record.rank,
        time_ns=record.time_ns,
        state="waits",
        idle_seconds=int(found["milliseconds"]) / 1000 if found["milliseconds"] else float(found["seconds"]),
        doing=location.collective,
        line=location.line,
        text=location.text,
        stack=location.stack,
    )


def find_missing(ranks: Mapping[int, RankStatus], timed_out: Mapping[int, RankStatus]) -> HangDiagnosis | None:
    """Name the ranks that did not arrive where the ranks in `timed_out` waited; None if no rank seems to be missing."""
    first = next(iter(timed_out.values()))
    statuses = {**ranks, **timed_out}
    others = [where for where in statuses.values() if where.state not in ("waits", "moves")]
    living = [where for where in others if where.state != "ended"]
    location = (first.doing, first.line)
    minority = [
        where for where in statuses.values() if where.state == "waits" and (where.doing, where.line) != location
    ]
    missing = living or [where for where in minority if where.rank not in timed_out] or others
    if not missing:
        return None
    waiting = [where for where in statuses.values() if where.state == "waits" and where not in missing]
    return HangDiagnosis(waiting=tuple(waiting), missing=tuple(missing), seconds=first.idle_seconds)
