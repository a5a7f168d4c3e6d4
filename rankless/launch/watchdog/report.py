"""A finding in words, for the terminal: at most 15 lines."""

from collections.abc import Callable, Sequence

from rankless.launch.watchdog.diagnosis import Finding
from rankless.launch.watchdog.stack_classifier import shown
from rankless.launch.watchdog.step_rate import Pace
from rankless.records.events import RankStatus
from rankless.records.quantities import timed

MOST_NAMED = 3
HostName = Callable[[int], str]
"""On which host a rank is; empty where there is only one."""


def report(finding: Finding, pace: Pace, *, host_name: HostName, stacks_file: str) -> str:
    """Who waits where, who does not come and where it is instead, and where to read more."""
    steps = f"{pace.steps} steps made" if pace.steps else "no step yet"
    if pace.step_seconds is not None:
        steps += f", a step took {timed(pace.step_seconds)}"
    lines = [f"no progress for {timed(finding.seconds)} ({steps}): {waiting_text(finding)}"]
    for culprit in finding.culprits[:MOST_NAMED]:
        lines.append(f"  {rank_text(culprit, host_name)} {culprit_text(finding, culprit)}")
        frames = shown(culprit.stack)
        lines += [f"      {frame}" for frame in (frames[-2:] if len(finding.culprits) > 1 else frames)]
    more = len(finding.culprits) - MOST_NAMED
    if more > 0:
        lines.append(f"  and {more} more")
    if not finding.culprits:
        lines.append("  no rank is missing: their sizes, dtypes or groups may differ, or the network is at fault")
    if stacks_file:
        lines.append(f"  all threads of all ranks: {stacks_file}")
    return "\n".join(lines)


def headline(finding: Finding, *, host_name: HostName) -> str:
    """What is said of the first culprit when the job is ended for it, after "rank 1"."""
    who = finding.culprits[0] if finding.culprits else finding.waiting[0]
    rest = [culprit for culprit in finding.culprits if culprit is not who]
    more = "; nor did " + ", ".join(rank_text(culprit, host_name) for culprit in rest) if rest else ""
    if not finding.culprits:
        return f"waits in {who.doing}{_at(who)}, as all do, for {timed(finding.seconds)}"
    if not finding.waiting:
        return f"has stood still for {timed(finding.seconds)}: {where_text(who)}{more}"
    return f"{culprit_text(finding, who)}; {waiting_text(finding)} for {timed(finding.seconds)}{more}"


def waiting_text(finding: Finding) -> str:
    """As "ranks 0, 2 wait in all_reduce at train.py:33"."""
    if not finding.waiting:
        return "every rank stands still"
    places: dict[str, list[int]] = {}
    for where in sorted(finding.waiting, key=lambda where: where.rank):
        places.setdefault(f"in {where.doing}{_at(where)}", []).append(where.rank)
    texts = []
    for place, ranks in list(places.items())[:MOST_NAMED]:
        texts.append(f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {place}")
    if len(places) > MOST_NAMED:
        texts.append(f"others in {len(places) - MOST_NAMED} more places")
    return ", ".join(texts)


def culprit_text(finding: Finding, where: RankStatus) -> str:
    """As "did not come: it is in load() at data.py:12 (sleeps, 0 % CPU)"."""
    return f"did not come: {where_text(where)}" if finding.waiting else where_text(where)


def where_text(where: RankStatus) -> str:
    """Where a rank is, in words."""
    if where.state == "waits":
        return f"it waits in {where.doing}{_at(where)}"
    if where.state == "ended":
        return "it has ended its script" + (f", and its process {where.doing}" if where.doing else "")
    place = f"it is in {where.text}" if "()" in where.text else f"it is at {where.text}"
    if not where.text:
        place = "its stack cannot be read"
    if where.state == "stopped":
        return f"it is stopped, by a signal ({where.doing})"
    if where.state == "debugged":
        return f"it is in a debugger{', ' + place if where.text else ''}"
    cpu = f"{where.cpu_percent:.0f} % CPU"
    how = where.doing or ("computes" if where.state == "computes" else "stands still")
    return f"{place} ({how}, {cpu})"


def rank_text(where: RankStatus, host_name: HostName) -> str:
    """As "rank 1 on 10.0.0.2"."""
    host = host_name(where.rank)
    return f"rank {where.rank} on {host}" if host else f"rank {where.rank}"


def _at(where: RankStatus) -> str:
    return f" at {where.line}" if where.line else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """As "ranks 0, 2"; a long row in short, as "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
