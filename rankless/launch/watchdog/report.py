"""Format a hang diagnosis for the terminal, in at most 15 lines."""

from collections.abc import Callable, Sequence

from rankless.launch.watchdog.hang_verdict import HangDiagnosis
from rankless.launch.watchdog.phase_timeouts import BY_NAME as PHASES
from rankless.launch.watchdog.phase_timeouts import StepRate
from rankless.launch.watchdog.processes_beside_workers import ProcessStatus
from rankless.launch.watchdog.stack_classifier import truncate_stack
from rankless.records.events import RankStatus
from rankless.records.number_formatting import format_ranks, format_seconds

MAX_LISTED = 3
HostName = Callable[[int], str]
"""The host of a rank; empty if the job has only one host."""


def format_report(
    diagnosis: HangDiagnosis,
    step_rate: StepRate,
    *,
    host_name: HostName,
    stacks_file: str,
    processes: Sequence[ProcessStatus] = (),
) -> str:
    """Say where ranks wait, what other processes do, where the missing ranks are, and which file has all stacks."""
    steps = f"{step_rate.steps} steps made" if step_rate.steps else "no step yet"
    if step_rate.step_seconds is not None:
        steps += f", a step took {format_seconds(step_rate.step_seconds)}"
    lines = [f"no progress for {format_seconds(diagnosis.seconds)} ({steps}): {describe_waiting(diagnosis)}"]
    for process in (diagnosis.silent or processes)[: len(processes) if diagnosis.asked_roles else MAX_LISTED]:
        lines.append(f"  {process.name} {process.doing}")
    for missing_rank in diagnosis.missing[:MAX_LISTED]:
        name = format_rank(missing_rank, host_name) + ("" if diagnosis.waiting else ":")
        lines.append(f"  {name} {describe_missing(diagnosis, missing_rank)}")
        frames = truncate_stack(missing_rank.stack)
        lines += [f"      {frame}" for frame in (frames[-2:] if len(diagnosis.missing) > 1 else frames)]
    more = len(diagnosis.missing) - MAX_LISTED
    if more > 0:
        lines.append(f"  and {more} more")
    if not diagnosis.missing and not diagnosis.silent:
        lines.append(f"  no rank is missing: {describe_full_wait(diagnosis)}")
    if stacks_file:
        lines.append(f"  all threads of all ranks: {stacks_file}")
    return "\n".join(lines)


def format_headline(diagnosis: HangDiagnosis, *, host_name: HostName) -> str:
    """Return the cause for which the job ends, to follow "rank 1" of the first missing rank, or "server 1"."""
    if diagnosis.silent:
        more = "".join(f"; {process.name} {process.doing}" for process in diagnosis.silent[1:])
        seconds = format_seconds(diagnosis.seconds)
        return f"{diagnosis.silent[0].doing}; {describe_waiting(diagnosis)} for {seconds}{more}"
    first = diagnosis.missing[0] if diagnosis.missing else diagnosis.waiting[0]
    rest = [missing_rank for missing_rank in diagnosis.missing if missing_rank is not first]
    seconds = format_seconds(diagnosis.seconds)
    also = "also missing" if diagnosis.waiting else "also idle"
    more = f"; {also}: " + ", ".join(format_rank(each, host_name) for each in rest) if rest else ""
    if not diagnosis.missing:
        return f"waits in {first.doing}{_format_location(first)}, like every other rank, for {seconds}"
    if not diagnosis.waiting:
        return f"made no progress for {seconds}: {describe_status(first)}{more}"
    return f"{describe_missing(diagnosis, first)}; {describe_waiting(diagnosis)} for {seconds}{more}"


def describe_waiting(diagnosis: HangDiagnosis) -> str:
    """Describe the waiting ranks as "ranks 0, 2 wait in all_reduce at train.py:33"."""
    if not diagnosis.waiting:
        return "every rank is idle"
    locations: dict[str, list[int]] = {}
    for where in sorted(diagnosis.waiting, key=lambda where: where.rank):
        place = f"in {where.doing}{_format_location(where)}" if where.state == "waits" else f"at {where.text or '?'}"
        locations.setdefault(place, []).append(where.rank)
    texts = []
    for location, ranks in list(locations.items())[:MAX_LISTED]:
        texts.append(f"{format_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {location}")
    if len(locations) > MAX_LISTED:
        texts.append(f"other ranks wait in {len(locations) - MAX_LISTED} more places")
    return ", ".join(texts)


def describe_full_wait(diagnosis: HangDiagnosis) -> str:
    """Describe what may be wrong if every rank waits in the same place."""
    if all(where.is_rendezvous for where in diagnosis.waiting):
        return (
            "the ranks do not find each other: MASTER_ADDR, MASTER_PORT, world size or store may differ between them, "
            "or a firewall rejects their connections"
        )
    roles = diagnosis.asked_roles
    if roles:
        names = ", ".join(process.name for process in diagnosis.busy)
        verb = "computes" if len(diagnosis.busy) == 1 else "compute"
        return (
            f"{names} {verb}" if names else f"no {' and no '.join(roles)} computes: a request or an answer may be lost"
        )
    return "sizes, dtypes or groups may differ between ranks, or the network is at fault"


def describe_missing(diagnosis: HangDiagnosis, where: RankStatus) -> str:
    """Describe a missing rank as "did not arrive: it is in load() at data.py:12 (sleeps, 0 % CPU)"."""
    return f"did not arrive: {describe_status(where)}" if diagnosis.waiting else describe_status(where)


def describe_status(where: RankStatus) -> str:
    """Say where a rank is."""
    if where.connecting_to:
        return (
            f"it gets no answer from {where.connecting_to} in {where.doing}{_format_location(where)} (a firewall drops "
            "packets, or the address is wrong)"
        )
    if where.state == "waits":
        return f"it waits in {where.doing}{_format_location(where)}"
    if where.state == "ended":
        return "its script has ended" + (f", but its process {where.doing}" if where.doing else "")
    if where.phase == "start":
        return _describe_start(where)
    text, semicolon, more = where.text.partition(";")
    location = f"it is {'in' if '()' in text else 'at'} {text}"
    if doing := PHASES[where.phase].doing:
        location += f" while it {doing}"
    location += semicolon + more
    if not where.text:
        location = "its stack cannot be read"
    if where.state == "stopped":
        return f"it is stopped by a signal ({where.doing})"
    if where.state == "debugged":
        return f"it is in a debugger{', ' + location if where.text else ''}"
    cpu = f"{where.cpu_percent:.0f} % CPU"
    how = where.doing or ("computes" if where.state == "computes" else "is idle")
    return f"{location} ({how}, {cpu})"


def _describe_start(where: RankStatus) -> str:
    if where.state == "stopped":
        return f"{where.text} is stopped by a signal ({where.doing})"
    how = where.doing or ("computes" if where.state == "computes" else "is idle")
    return f"{where.text} {how} ({where.cpu_percent:.0f} % CPU)"


def format_rank(where: RankStatus, host_name: HostName) -> str:
    """Format a rank as "rank 1 on 10.0.0.2"."""
    host = host_name(where.rank)
    return f"rank {where.rank} on {host}" if host else f"rank {where.rank}"


def _format_location(where: RankStatus) -> str:
    return f" at {where.line}" if where.line else ""
