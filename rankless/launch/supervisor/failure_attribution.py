"""Decides which rank caused a failure, from the records in the order in which they arrived.

Note [root cause and secondary failures]: a rank that loses its connection to a peer is a secondary failure, whatever it
reports itself. So is a rank whose wait for its peers has timed out. The order of exits misleads: the root cause may
destroy its groups and clean up for a long time, while the secondary failures exit at once. The root cause is therefore
the first rank that reported a failure of its own: an exception other than a lost connection, an exit code, death by a
signal, or the destruction of its process groups before other ranks lost it. A process of a role that ends while workers
run is a root cause too: the agent notices its end itself, before it reads what the workers report.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

from rankless.config.extensions import list_extensions
from rankless.errors import LostWorkerError
from rankless.launch.signal_reader import name_signal
from rankless.launch.supervisor.failure_report import find_line, first_line
from rankless.launch.supervisor.verdict_types import EXPLAINED_SETTLING_SECONDS, SecondaryFailure, Verdict
from rankless.launch.watchdog.hang_verdict import parse_timeout
from rankless.records.events import (
    AnyRecord,
    Exited,
    GroupTeardown,
    HangDetected,
    HostInterrupted,
    HostLost,
    ProcessExited,
    Raised,
    ScriptFinished,
    Started,
)

SETTLING_SECONDS = 0.3
"""How long the record of the root cause may take to arrive after a secondary failure's, if its process was killed."""
UNEXPLAINED_SETTLING_SECONDS = 0.6
"""The same while no record explains the failure: records of another busy host take longer."""
PRINTING_SECONDS = 1.0
"""How long the root cause may take to print its traceback, before the agent ends it with the other ranks."""
TIMEOUT_SETTLING_SECONDS = 1.5
"""How long the watchdog may take to find the missing rank after a collective has timed out."""

_LOST_CONNECTION = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Connection was likely closed"
    r"|remote process exited or there was a network error|Socket Timeout|failed to recv, got 0 bytes"
    r"|rank \d+ (raised|failed)\b"
    r"|the process of rank \d+ has ended|rank \d+ (aborted|has closed) the group|the launcher ends the run"
    r"|the connection to (rank \d+|a rank of another host) is lost|cannot go on with the ranks of other hosts"
    r"|ranks? \d[\d, and]* ended without the call"
    r"|rank \d+ left a collective because of an exception|rank \d+ found that the calls of the ranks do not match"
)
_WHILE = " while workers ran"

MAX_SHOWN_CHARS = 400
"""Limit for the names that a rank has not submitted. Its error has all of them."""


def attribute_failure(records: Sequence[AnyRecord], host_of: Callable[[int], int] = lambda _rank: 0) -> Verdict | None:
    """Return the verdict that the records so far allow, or None while nothing has failed.

    `host_of` maps a rank to its host.
    """
    own = [verdict for index in range(len(records)) if (verdict := _find_own_failure(records, index)) is not None]
    if _have_all_succeeded(records):
        own = [verdict for verdict in own if verdict.root_cause_number is None]
    if own and own[0].cause == "left":
        # The rank may have caught a lost connection and exited in order. A death by signal is then the root cause:
        # another process reports it, a little later than it happens.
        is_cause = (each for each in own if each.cause == "signal" or each.root_cause_number is not None)
        return next(is_cause, own[0])
    if own:
        return own[0]
    secondary = [record for record in records if isinstance(record, Raised)]
    if not secondary:
        return None
    return (
        _find_lost_worker(records, secondary[0])
        or _find_restarted_process(records, secondary)
        or _find_stalled_rank(secondary)
        or _find_early_exit(records, secondary[0], host_of)
        or _find_timeout(records, secondary)
        or Verdict(
            root_cause_rank=secondary[0].rank,
            cause="lost",
            exit_code=1,
            headline=f"lost its connection to a peer, and no peer reported why ({first_line(secondary[0])})",
            traceback=secondary[0].traceback,
            settling_seconds=UNEXPLAINED_SETTLING_SECONDS,
        )
    )


def is_secondary_failure(record: Raised | GroupTeardown) -> bool:
    """Whether an exception, or one of its causes, is a lost connection, or tells what another rank did.

    That the rank itself has raised is no lost connection. That it has ended its own group is one: it does so because
    a peer is lost.
    """
    if record.error_type == LostWorkerError.__name__:
        return True
    text = record.traceback + record.message
    if any(re.search(pattern, text) for each in list_extensions() for pattern in each.failures.secondary):
        return True
    found = [each[0] for each in _LOST_CONNECTION.finditer(text)]
    own = (f"rank {record.rank} raised", f"rank {record.rank} failed")
    return any(not each.startswith(own) for each in found) or find_lost_process(record) is not None


def find_lost_process(record: Raised | GroupTeardown) -> tuple[str, int] | None:
    """Return the role and the number of the process whose lost connection an exception, or one of its causes, is."""
    text = f"{record.traceback}\n{record.message}"
    for each in list_extensions():
        match = re.search(each.failures.lost, text) if each.failures.lost and each.role is not None else None
        if match is not None and each.role is not None:
            return each.role.process, int(match[1])
    return None


def _find_own_failure(records: Sequence[AnyRecord], index: int) -> Verdict | None:
    """Return the verdict if the record at `index` reports a failure of the rank itself."""
    record = records[index]
    if isinstance(record, Raised) and not is_secondary_failure(record) and parse_timeout(record) is None:
        code = 130 if record.error_type == "KeyboardInterrupt" else 1
        ends = [each for each in records[index:] if isinstance(each, ScriptFinished | Exited)]
        has_printed = any(each.rank == record.rank for each in ends)
        return Verdict(
            root_cause_rank=record.rank,
            cause="raised",
            exit_code=code,
            headline=f"raised {first_line(record)}",
            line=find_line(record),
            traceback=record.traceback,
            settling_seconds=EXPLAINED_SETTLING_SECONDS if has_printed else PRINTING_SECONDS,
        )
    if isinstance(record, ScriptFinished | Exited):
        earlier = [each for each in records[:index] if each.rank == record.rank]
        return None if any(map(_reports_failure, earlier)) else _attribute_exit(record)
    if isinstance(record, ProcessExited):
        return None if record.is_restarted or record.is_covered else _attribute_process_exit(record)
    if isinstance(record, HangDetected):
        return Verdict(
            root_cause_rank=record.rank,
            root_cause_number=record.number,
            role=record.role,
            cause="hang",
            exit_code=1,
            headline=record.headline,
            traceback=record.traceback,
        )
    if isinstance(record, HostLost):
        if record.is_covered:
            return None
        return Verdict(
            root_cause_rank=record.rank,
            root_cause_host=record.host,
            cause="host",
            exit_code=1,
            headline=f"host {record.host} {record.how}",
        )
    if isinstance(record, HostInterrupted):
        return Verdict(
            root_cause_rank=record.rank,
            root_cause_host=record.host,
            cause="interrupted",
            exit_code=128 + record.signal,
            headline=f"host {record.host} received {name_signal(record.signal)}",
        )
    return None


def _reports_failure(record: AnyRecord) -> bool:
    return isinstance(record, Raised) or (isinstance(record, ScriptFinished) and record.exit_code != 0)


def _attribute_exit(record: ScriptFinished | Exited) -> Verdict | None:
    if record.exit_code == 0 or (isinstance(record, Exited) and record.survivors is not None):
        return None
    if isinstance(record, ScriptFinished):
        return Verdict(
            root_cause_rank=record.rank,
            cause="left",
            exit_code=record.exit_code,
            headline=f"left with exit code {record.exit_code}",
            settling_seconds=SETTLING_SECONDS,
        )
    if record.exit_code < 0:
        number = -record.exit_code
        headline = f"was killed by signal {number} ({name_signal(number)})"
        return Verdict(root_cause_rank=record.rank, cause="signal", exit_code=128 + number, headline=headline)
    headline = f"ended with exit code {record.exit_code}, and its script reported no error"
    return Verdict(root_cause_rank=record.rank, cause="exit", exit_code=record.exit_code, headline=headline)


def _attribute_process_exit(record: ProcessExited) -> Verdict:
    """Return the verdict for a process of a role that has ended before the workers."""
    headline, code = f"ended with exit code {record.exit_code}{_WHILE}", record.exit_code
    if record.exit_code < 0:
        number = -record.exit_code
        headline, code = f"was killed by signal {number} ({name_signal(number)})", 128 + number
    return Verdict(
        root_cause_rank=record.rank,
        root_cause_number=record.number,
        role=record.role,
        cause="signal" if record.exit_code < 0 else "exit",
        exit_code=code or 1,
        headline=headline + record.note,
    )


def _have_all_succeeded(records: Sequence[AnyRecord]) -> bool:
    """Whether all workers that have started have ended with exit code 0, so that no process fails them any more."""
    started = {record.rank for record in records if isinstance(record, Started)}
    ended = [record for record in records if isinstance(record, Exited)]
    return bool(started) and started <= {
        record.rank for record in ended if record.exit_code == 0 or record.survivors is not None
    }


def _find_lost_worker(records: Sequence[AnyRecord], secondary: Raised) -> Verdict | None:
    """Find a worker that was lost, and without which another one could not continue."""
    lost = [record for record in records if isinstance(record, Exited) and record.survivors is not None]
    if not lost:
        return None
    verdict = _attribute_exit(msgspec.structs.replace(lost[-1], survivors=None))
    assert verdict is not None
    more = f", and rank {secondary.rank} could not continue without it ({first_line(secondary)})"
    return msgspec.structs.replace(verdict, headline=verdict.headline + more)


def _find_restarted_process(records: Sequence[AnyRecord], secondary: Sequence[Raised]) -> Verdict | None:
    """Find a process of a role that was started again, and that a worker has lost all the same."""
    for record in secondary:
        name = find_lost_process(record)
        ends = [each for each in records if isinstance(each, ProcessExited) and (each.role, each.number) == name]
        if ends:
            verdict = _attribute_process_exit(ends[-1])
            more = f", was started again, and rank {record.rank} could not continue"
            return msgspec.structs.replace(verdict, headline=verdict.headline.removesuffix(_WHILE) + more)
    return None


def _find_early_exit(records: Sequence[AnyRecord], secondary: Raised, host_of: Callable[[int], int]) -> Verdict | None:
    """Find a rank that ended, or destroyed its process groups, while other ranks still needed it."""
    at = records.index(secondary)
    remote = [record for record in records[at:] if host_of(record.rank) != host_of(secondary.rank)]
    for record in [*records[:at], *_find_unreported_exits(records, after=at), *_find_orderly_ends(remote)]:
        if record.rank == secondary.rank:
            continue
        if isinstance(record, GroupTeardown) and record.traceback and not is_secondary_failure(record):
            return Verdict(
                root_cause_rank=record.rank,
                cause="raised",
                exit_code=1,
                headline=f"raised {first_line(record)}",
                line=find_line(record),
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


def _find_orderly_ends(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Return the ends of ranks that have not lost a peer.

    From another host, such a record may arrive later than the secondary failure that it explains.
    """
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


def _find_unreported_exits(records: Sequence[AnyRecord], *, after: int) -> list[Exited]:
    """Return the exits of ranks whose script has not reported its end, as with `os._exit(0)`.

    The kernel closes a process's connections before the parent process learns of its end.
    """
    reported = {record.rank for record in records if isinstance(record, ScriptFinished)}
    return [record for record in records[after:] if isinstance(record, Exited) and record.rank not in reported]


def _find_stalled_rank(secondary: Sequence[Raised]) -> Verdict | None:
    """Find the rank that the message of an extension names as the one for which others waited too long."""
    patterns = [extension.failures.stalled for extension in list_extensions() if extension.failures.stalled]
    found = (re.search(pattern, record.message) for record in secondary for pattern in patterns)
    match = next(filter(None, found), None)
    if match is None:
        return None
    missing = match[2].splitlines()
    rank, _, names = missing[0].partition(": ")
    others = "".join(f"; rank {line.replace(': ', ' not ', 1)}" for line in missing[1:])
    names = names if len(names) <= MAX_SHOWN_CHARS else f"{names[:MAX_SHOWN_CHARS]}…"
    return Verdict(
        root_cause_rank=int(rank),
        cause="stalled",
        exit_code=1,
        headline=f"did not submit {names}, for which others waited more than {match[1]} s{others[:MAX_SHOWN_CHARS]}",
    )


def _find_timeout(records: Sequence[AnyRecord], secondary: Sequence[Raised]) -> Verdict | None:
    """Blame the first rank whose collective timed out, and name the ranks that did not report waiting in it."""
    waits = [status for record in secondary if (status := parse_timeout(record)) is not None]
    if not waits:
        return None
    first = waits[0]
    started = {record.rank for record in records if isinstance(record, Started)}
    silent = sorted(started - {each.rank for each in waits})
    others = f"; did not report waiting there: {', '.join(f'rank {rank}' for rank in silent)}" if silent else ""
    return Verdict(
        root_cause_rank=first.rank,
        cause="timeout",
        exit_code=1,
        headline=f"waited in {first.doing} at {first.line} until its timeout of {first.idle_seconds:g} s{others}",
        traceback=next(record.traceback for record in secondary if record.rank == first.rank),
        settling_seconds=TIMEOUT_SETTLING_SECONDS,
    )


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
