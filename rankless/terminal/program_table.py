"""What `rankless plan` shows: jobs after lowering, as a table that fits a terminal and as JSON."""

import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rankless.records.job_programs import AnyFact, JobProgram, KnownJob, PlannedInput, PlannedMove

WIDTH = 100
UNITS = ("B", "kB", "MB", "GB", "TB")


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job for one kind of call, and the sums of what moves at each call, in bytes.

    `moved_bytes` adds up the whole values; `sent_bytes` what each worker sends, when collectives go round a ring.
    """

    program: JobProgram
    moved_bytes: int
    sent_bytes: int


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `rankless plan --json` writes."""

    workers: int
    steps: int
    """After how many training steps the script was ended."""
    jobs: tuple[PlannedJob, ...]
    """In the order in which they were captured; a job that was called in several ways stands there several times."""
    not_reached: tuple[KnownJob, ...]
    """Jobs that the script had defined, and not called by then."""


def make_plan_report(facts: Iterable[AnyFact], *, workers: int, steps: int) -> PlanReport:
    """The report on what a run has written down of its jobs."""
    known = list(facts)
    return PlanReport(
        workers=workers,
        steps=steps,
        jobs=tuple(
            PlannedJob(
                program=fact,
                moved_bytes=sum(move.bytes for move in fact.moves),
                sent_bytes=sum(move.sent_bytes for move in fact.moves),
            )
            for fact in known
            if isinstance(fact, JobProgram)
        ),
        not_reached=tuple(fact for fact in known if isinstance(fact, KnownJob) and not fact.called),
    )


def encode_plan_report(report: PlanReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def render_plan(report: PlanReport) -> str:
    """All jobs, one below the other; no line is wider than 100 characters."""
    lines = [line for job in report.jobs for line in ("", *_job(job))]
    steps = f"{report.steps} training step{'s' if report.steps != 1 else ''}"
    for job in report.not_reached:
        lines += ["", f"job {job.job} ({_short(job.line)}) was not called within {steps}; --steps K goes further"]
    return "\n".join(_cut(line, WIDTH) for line in lines)


def _job(job: PlannedJob) -> Iterator[str]:
    program = job.program
    kind = "train job" if program.trains else "predict job"
    yield f"{kind} {program.job} ({_short(program.line)}): {program.operators} operators"
    for what in ("argument", "parameter", "buffer", "constant"):
        yield from _inputs(what, [item for item in program.inputs if item.kind == what])
    if program.moves:
        yield "  moves at every call, in the order in which they start (~ travels while the program goes on):"
        yield from _moves(program.moves)
        count = len(program.moves)
        yield (
            f"  total: {count} move{'s' if count != 1 else ''}, {bytes_text(job.moved_bytes)} of values; "
            f"each worker sends {bytes_text(job.sent_bytes)} (round a ring)"
        )
    else:
        yield "  total: nothing moves"
    gathered = [f"{item.operator} ({_short(item.line)})" for item in program.gathered]
    yield f"  gathered and computed whole for lack of a rule: {len(gathered) or 'none'}"
    yield from (f"    {text}" for text in gathered)


def _inputs(what: str, items: Sequence[PlannedInput]) -> Iterator[str]:
    """Inputs of one kind, a line for each way in which they lie."""
    ways: dict[str, list[PlannedInput]] = {}
    for item in items:
        ways.setdefault(item.placement, []).append(item)
    for placement, together in ways.items():
        count, size = len(together), bytes_text(sum(item.bytes for item in together))
        yield f"  {count} {what}{'s' if count != 1 else ''}, {size}: {placement}"


def _moves(moves: Sequence[PlannedMove]) -> Iterator[str]:
    """Moves of the same kind and size at the same line, as repeated layers have them, are one line."""
    groups: dict[tuple[object, ...], list[PlannedMove]] = {}
    width = min(24, max(len(_short(move.line)) for move in moves))
    yield f"          {'kind':14} {'value':>7} {'sent':>7}  {'line':{width}}  why"
    for move in moves:
        key = (move.kind, move.bytes, move.sent_bytes, move.line, move.reason, move.overlapped)
        groups.setdefault(key, []).append(move)
    for together in groups.values():
        move, count = together[0], len(together)
        yield (
            f"  {f'{count} x' if count > 1 else '':>5} {'~' if move.overlapped else '':1} {move.kind:14} "
            f"{bytes_text(move.bytes):>7} {bytes_text(move.sent_bytes):>7}  {_cut(_short(move.line), width):{width}}  "
            f"{move.reason} ({move.value})"
        )


def bytes_text(size: int) -> str:
    """A number of bytes in the unit that keeps it short, as "1.2 MB"."""
    number, unit = float(size), 0
    while number >= 999.5 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {UNITS[unit]}" if unit == 0 or number >= 99.5 else f"{number:.1f} {UNITS[unit]}"


def _short(line: str) -> str:
    return os.path.basename(line)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
