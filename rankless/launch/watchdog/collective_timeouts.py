"""Ranks whose wait in a collective has come to the timeout of the script's own process group: they are not to blame.

PyTorch raises in who has waited, and says of the others nothing. Where they are is looked for at once, as when a job
stands still: whoever is elsewhere has not come.
"""

import re
from collections.abc import Mapping

from rankless.launch.watchdog.diagnosis import Finding
from rankless.launch.watchdog.stack_classifier import place_of
from rankless.launch.watchdog.stacks import Frame
from rankless.records.events import Raised, RankStatus

_TIMED_OUT = re.compile(r"(?:Timed out waiting|[Ww]ait timeout after) (\d+) ?ms")
"""As Gloo says it, and the store at which ranks meet."""
_BEGINNING = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def timed_out(record: Raised) -> RankStatus | None:
    """Where a rank waited for others until a timeout raised; None if something else did."""
    found = _TIMED_OUT.search(record.traceback)
    if found is None:
        return None
    _, _, trace = record.traceback[: found.start()].rpartition(_BEGINNING)
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(trace)]
    place = place_of(frames[::-1]) if frames else None
    if place is None or not place.waits_in:
        return None
    return RankStatus(
        rank=record.rank,
        time_ns=record.time_ns,
        state="waits",
        still_seconds=int(found[1]) / 1000,
        doing=place.waits_in,
        line=place.line,
        text=place.text,
        stack=place.stack,
    )


def find_missing(ranks: Mapping[int, RankStatus], late: Mapping[int, RankStatus]) -> Finding | None:
    """Who did not come to where the ranks of `late` waited; None if no rank seems to be missing."""
    first = next(iter(late.values()))
    everyone = {**ranks, **late}
    others = [where for where in everyone.values() if where.state not in ("waits", "moves")]
    living = [where for where in others if where.state != "ended"]
    place = (first.doing, first.line)
    apart = [where for where in everyone.values() if where.state == "waits" and (where.doing, where.line) != place]
    culprits = living or [where for where in apart if where.rank not in late] or others
    if not culprits:
        return None
    waiting = [where for where in everyone.values() if where.state == "waits" and where not in culprits]
    return Finding(waiting=tuple(waiting), culprits=tuple(culprits), seconds=first.still_seconds)
