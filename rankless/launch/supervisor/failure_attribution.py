"""The one place that judges: who ended the job, and why, from the records in the order in which they arrived.

Note [culprits and victims]: a rank that loses its connection to a peer is a victim, whatever it says
itself; so is one whose wait for its peers has timed out. The order of exits misleads too: a culprit may
destroy its groups and clean up for long, while its victims die at once. So the first rank counts that
reported something of its own: an exception that is no lost connection, an exit code, a death by signal,
or that it left its groups before the others lost it.
"""

import re
import signal
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rankless.launch.watchdog.collective_timeouts import parse_timeout
from rankless.records.events import (
    AnyRecord,
    Exited,
    GroupTeardown,
    HangDetected,
    HostInterrupted,
    HostLost,
    Raised,
    ScriptFinished,
    Started,
)

ATTRIBUTED_RECORDS = (
    Started | Raised | GroupTeardown | ScriptFinished | Exited | HostLost | HostInterrupted | HangDetected
)
"""The records that matter to a verdict: of all others a long job has too many to keep."""

SETTLING_SECONDS = 0.3
"""After a victim's record: how long the culprit's own may take to arrive, as that of a killed process."""
UNEXPLAINED_SETTLING_SECONDS = 0.6
"""As long as nobody has told why: on a busy machine another host's word takes its time."""
SURE_SETTLING_SECONDS = 0.05
TIMEOUT_SETTLING_SECONDS = 1.5
"""After a wait that has timed out: how long the hang watch may take to find who did not come."""

_LOST_CONNECTION = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Connection was likely closed"
    r"|remote process exited or there was a network error|Socket Timeout|failed to recv, got 0 bytes"
    r"|rank \d+ (raised|failed)\b|Horovod has been shut down"
)

MOST_SHOWN = 400
"""Characters of what a rank has not submitted; all of it is in its error."""
_STALLED = re.compile(r"Stalled for more than (\S+) seconds\.\nMissing ranks:\n((?:\d+: \[.*\]\n?)+)")
"""What Horovod's stall check ends a job with, where it is asked to."""

Cause = Literal["raised", "left", "signal", "exit", "lost", "timeout", "host", "interrupted", "hang", "stalled"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who ended the job, how, and what the job's exit code is."""

    root_cause_rank: int
    """A rank; of a host that is to blame as a whole its first."""
    cause: Cause
    exit_code: int
    headline: str
    traceback: str = ""
    settling_seconds: float = SURE_SETTLING_SECONDS


def attribute_failure(records: Sequence[AnyRecord], host_of: Callable[[int], int] = lambda _rank: 0) -> Verdict | None:
    """The verdict as far as `records` go, or None while nothing has failed. `host_of` tells a rank's host."""
    own = [verdict for index in range(len(records)) if (verdict := _own_failure(records, index)) is not None]
    if own and own[0].cause == "left":
        # Perhaps it caught a lost connection and gave up politely. A death by signal, which another process
        # reports a little later than it happens, is then the first cause.
        return next((verdict for verdict in own if verdict.cause == "signal"), own[0])
    if own:
        return own[0]
    victims = [record for record in records if isinstance(record, Raised)]
    if not victims:
        return None
    return (
        _stalled(victims)
        or _who_left(records, victims[0], host_of)
        or _timed_out(records, victims)
        or Verdict(
            root_cause_rank=victims[0].rank,
            cause="lost",
            exit_code=1,
            headline=f"lost its connection to a peer, and no peer reported why ({_first_line(victims[0])})",
            traceback=victims[0].traceback,
            settling_seconds=UNEXPLAINED_SETTLING_SECONDS,
        )
    )


def is_secondary_failure(record: Raised | GroupTeardown) -> bool:
    """Whether an exception, or one that it came from, is a lost connection."""
    return _LOST_CONNECTION.search(record.traceback + record.message) is not None


def _own_failure(records: Sequence[AnyRecord], index: int) -> Verdict | None:
    record = records[index]
    before = [earlier for earlier in records[:index] if earlier.rank == record.rank]
    if isinstance(record, Raised) and not is_secondary_failure(record) and parse_timeout(record) is None:
        code = 130 if record.error_type == "KeyboardInterrupt" else 1
        return Verdict(
            root_cause_rank=record.rank,
            cause="raised",
            exit_code=code,
            headline=f"raised {_first_line(record)}",
            traceback=record.traceback,
        )
    told = any(
        isinstance(earlier, Raised) or (isinstance(earlier, ScriptFinished) and earlier.exit_code) for earlier in before
    )
    if isinstance(record, ScriptFinished) and record.exit_code != 0 and not told:
        return Verdict(
            root_cause_rank=record.rank,
            cause="left",
            exit_code=record.exit_code,
            headline=f"left with exit code {record.exit_code}",
            settling_seconds=SETTLING_SECONDS,
        )
    if isinstance(record, Exited) and record.exit_code != 0 and not told:
        return _judge_exit(record)
    if isinstance(record, HangDetected):
        return Verdict(
            root_cause_rank=record.rank,
            cause="hang",
            exit_code=1,
            headline=record.headline,
            traceback=record.traceback,
        )
    if isinstance(record, HostLost):
        return Verdict(
            root_cause_rank=record.rank, cause="host", exit_code=1, headline=f"host {record.host} {record.how}"
        )
    if isinstance(record, HostInterrupted):
        return Verdict(
            root_cause_rank=record.rank,
            cause="interrupted",
            exit_code=128 + record.signal,
            headline=f"host {record.host} was told to end ({name_signal(record.signal)})",
        )
    return None


def _judge_exit(record: Exited) -> Verdict:
    if record.exit_code < 0:
        number = -record.exit_code
        headline = f"was killed by signal {number} ({name_signal(number)})"
        return Verdict(root_cause_rank=record.rank, cause="signal", exit_code=128 + number, headline=headline)
    headline = f"ended with exit code {record.exit_code}, without a word from its script"
    return Verdict(root_cause_rank=record.rank, cause="exit", exit_code=record.exit_code, headline=headline)


def _who_left(records: Sequence[AnyRecord], victim: Raised, host_of: Callable[[int], int]) -> Verdict | None:
    at = records.index(victim)
    far = [record for record in records[at:] if host_of(record.rank) != host_of(victim.rank)]
    for record in [*records[:at], *_silent_ends(records, after=at), *_good_ends(far)]:
        if record.rank == victim.rank:
            continue
        if isinstance(record, GroupTeardown) and record.traceback and not is_secondary_failure(record):
            return Verdict(
                root_cause_rank=record.rank,
                cause="raised",
                exit_code=1,
                headline=f"raised {_first_line(record)}",
                traceback=record.traceback,
                settling_seconds=SETTLING_SECONDS,
            )
        if isinstance(record, GroupTeardown | ScriptFinished) or (isinstance(record, Exited) and record.exit_code == 0):
            how = "destroyed its process group" if isinstance(record, GroupTeardown) else "ended its script"
            return Verdict(
                root_cause_rank=record.rank,
                cause="left",
                exit_code=1,
                headline=f"{how} while other ranks still needed it",
                settling_seconds=SETTLING_SECONDS,
            )
    return None


def _good_ends(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Who left without having lost a peer: from another host this may arrive after its victim's word has."""
    raised = {record.rank for record in records if isinstance(record, Raised)}
    return [
        record
        for record in records
        if record.rank not in raised
        and (
            (isinstance(record, GroupTeardown) and not is_secondary_failure(record))
            or (isinstance(record, ScriptFinished) and record.exit_code == 0)
        )
    ]


def _stalled(victims: Sequence[Raised]) -> Verdict | None:
    found = next((found for record in victims if (found := _STALLED.search(record.message))), None)
    if found is None:
        return None
    missing = found[2].splitlines()
    rank, _, keys = missing[0].partition(": ")
    others = "".join(f"; rank {line.replace(': ', ' not ', 1)}" for line in missing[1:])
    keys = keys if len(keys) <= MOST_SHOWN else f"{keys[:MOST_SHOWN]}…"
    return Verdict(
        root_cause_rank=int(rank),
        cause="stalled",
        exit_code=1,
        headline=f"did not submit {keys}, for which others waited more than {found[1]} s{others[:MOST_SHOWN]}",
    )


def _timed_out(records: Sequence[AnyRecord], victims: Sequence[Raised]) -> Verdict | None:
    waited = [where for record in victims if (where := parse_timeout(record)) is not None]
    if not waited:
        return None
    first = waited[0]
    unheard = sorted(
        {record.rank for record in records if isinstance(record, Started)} - {each.rank for each in waited}
    )
    others = f"; not heard to wait there: {', '.join(f'rank {rank}' for rank in unheard)}" if unheard else ""
    return Verdict(
        root_cause_rank=first.rank,
        cause="timeout",
        exit_code=1,
        headline=f"waited in {first.doing} at {first.line} until its timeout of {first.still_seconds:g} s{others}",
        traceback=next(record.traceback for record in victims if record.rank == first.rank),
        settling_seconds=TIMEOUT_SETTLING_SECONDS,
    )


def _silent_ends(records: Sequence[AnyRecord], *, after: int) -> list[Exited]:
    # As `os._exit(0)` does: the kernel closes a process's connections before its parent learns of its end.
    told = {record.rank for record in records if isinstance(record, ScriptFinished)}
    return [record for record in records[after:] if isinstance(record, Exited) and record.rank not in told]


def _first_line(record: Raised | GroupTeardown) -> str:
    line = (record.message.strip().splitlines() or [""])[0]
    return f"{record.error_type}: {line[:200]}" if line else record.error_type


def name_signal(number: int) -> str:
    """A signal's name, as SIGKILL."""
    return signal.Signals(number).name if number in signal.valid_signals() else "unknown"
