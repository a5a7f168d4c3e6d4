"""Format the parallel plan that `rankless plan` shows, as a table that fits a terminal and as JSON."""

import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rankless.records.job_programs import JobProgram, KnownJob, ProgramCommunication, ProgramInputRecord, ProgramRecord

WIDTH = 100
UNITS = ("B", "kB", "MB", "GB", "TB")


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job's program for one kind of call, and the totals of the data that it moves per call, in bytes.

    `moved_bytes` adds up the sizes of the whole values. `sent_bytes` adds up what each worker sends in ring
    collectives.
    """

    program: JobProgram
    moved_bytes: int
    sent_bytes: int


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `rankless plan`, without the fields that `--json` adds for all commands."""

    workers: int
    steps: int
    """The training steps after which `rankless plan` ended the script."""
    jobs: tuple[PlannedJob, ...]
    """In order of capture; a job with several kinds of calls appears once for each."""
    not_reached: tuple[KnownJob, ...]
    """Jobs that the script defined but did not call."""


def make_plan_report(facts: Iterable[ProgramRecord], *, workers: int, steps: int) -> PlanReport:
    """Make the report from the facts that a run recorded about its jobs."""
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


def render_plan(report: PlanReport) -> str:
    """Format all jobs, one below the other, in lines of at most 100 characters."""
    lines = [line for job in report.jobs for line in ("", *_render_job(job))]
    steps = f"{report.steps} training step{'s' if report.steps != 1 else ''}"
    for job in report.not_reached:
        lines += [
            "",
            f"job {job.job} ({_shorten_line(job.line)}) was not called within {steps}; increase --steps",
        ]
    return "\n".join(_truncate(line, WIDTH) for line in lines)


def _render_job(job: PlannedJob) -> Iterator[str]:
    program = job.program
    kind = "train job" if program.trains else "predict job"
    yield f"{kind} {program.job} ({_shorten_line(program.line)}): {program.operators} operators"
    for kind in ("argument", "parameter", "buffer", "constant"):
        yield from _render_inputs(kind, [item for item in program.inputs if item.kind == kind])
    if program.moves:
        yield "  data moved per call, in order of start (~ overlaps with computation):"
        yield from _render_moves(program.moves)
        count = len(program.moves)
        yield (
            f"  total: {count} move{'s' if count != 1 else ''}, {format_decimal_bytes(job.moved_bytes)} of values; "
            f"each worker sends {format_decimal_bytes(job.sent_bytes)} (ring collectives)"
        )
    else:
        yield "  total: nothing moves"
    gathered = [f"{item.operator} ({_shorten_line(item.line)})" for item in program.gathered]
    yield f"  operators without a sharding rule, computed replicated: {len(gathered) or 'none'}"
    yield from (f"    {text}" for text in gathered)


def _render_inputs(kind: str, items: Sequence[ProgramInputRecord]) -> Iterator[str]:
    """Yield one line for each placement of the inputs of one kind."""
    groups: dict[str, list[ProgramInputRecord]] = {}
    for item in items:
        groups.setdefault(item.placement, []).append(item)
    for placement, members in groups.items():
        count, size = len(members), format_decimal_bytes(sum(item.bytes for item in members))
        yield f"  {count} {kind}{'s' if count != 1 else ''}, {size}: {placement}"


def _render_moves(moves: Sequence[ProgramCommunication]) -> Iterator[str]:
    """Yield the moves; equal moves on one line, such as those of repeated layers, share a row."""
    groups: dict[tuple[object, ...], list[ProgramCommunication]] = {}
    width = min(24, max(len(_shorten_line(move.line)) for move in moves))
    yield f"          {'kind':14} {'value':>7} {'sent':>7}  {'line':{width}}  why"
    for move in moves:
        key = (move.kind, move.bytes, move.sent_bytes, move.line, move.reason, move.overlapped)
        groups.setdefault(key, []).append(move)
    for members in groups.values():
        move, count = members[0], len(members)
        line = _truncate(_shorten_line(move.line), width)
        yield (
            f"  {f'{count} x' if count > 1 else '':>5} {'~' if move.overlapped else '':1} {move.kind:14} "
            f"{format_decimal_bytes(move.bytes):>7} {format_decimal_bytes(move.sent_bytes):>7}  {line:{width}}  "
            f"{move.reason} ({move.value})"
        )


def format_decimal_bytes(size: int) -> str:
    """Format a number of bytes in its shortest unit, as "1.2 MB"."""
    number, unit = float(size), 0
    while number >= 999.5 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {UNITS[unit]}" if unit == 0 or number >= 99.5 else f"{number:.1f} {UNITS[unit]}"


def _shorten_line(line: str) -> str:
    return os.path.basename(line)


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
