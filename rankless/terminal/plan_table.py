"""Format the parallel plan that `rankless plan` shows, as a table that fits a terminal."""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rankless.records.job_programs import (
    CountedCall,
    CountedMove,
    DefinedJob,
    JobMemory,
    JobProgram,
    PipelineRecord,
    ProbedOperator,
    ProgramCommunication,
    ProgramInputRecord,
    ProgramRecord,
    RecordedStep,
    ReplicatedOperator,
    TableLookup,
)
from rankless.records.number_formatting import format_count, format_decimal_bytes
from rankless.records.program_by_module import (
    GatherPlace,
    ModuleGroup,
    describe_gather_place,
    format_modules,
    group_by_module,
    list_gather_places,
)

WIDTH = 100
"""Columns if the output is not a terminal."""
_COLUMN_WIDTH = 10
"""The least width of a column of the modules."""
MIN_WIDTH = 40
MIN_LAST_COLUMN = 30
NARROW_INDENT = 9
NAMES_SHOWN = 3


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job's program for one kind of call, and the totals of the data that it moves per call, in bytes.

    `moved_bytes` adds up the sizes of the whole values. `sent_bytes` adds up what each worker sends in ring
    collectives.
    """

    program: JobProgram
    moved_bytes: int
    sent_bytes: int
    gathered_bytes: int
    """The part of `moved_bytes` in values that were split between workers and that every worker gets in full."""
    gather_places: tuple[GatherPlace, ...]
    """Where operators gather such values. A run warns of the costly ones, once per job."""
    memory: JobMemory | None = None


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of an ordinary loop, and its totals. `moved_bytes` and `sent_bytes` mean what they mean for a job."""

    recorded: RecordedStep
    divided_calls: int
    """The calls whose rows the workers divide."""
    whole_calls: int
    """The calls that every worker computes whole: those of the kinds "whole" and "plain"."""
    moved_bytes: int
    sent_bytes: int
    gathered_bytes: int
    """The part of `moved_bytes` in values that were split between workers and that every worker gets in full."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `rankless plan`, without the fields that `--json` adds for all commands."""

    workers: int
    servers: int = 0
    """The servers, which hold the rows of tables. 0: each worker has all rows."""
    steps: int
    """The training steps after which `rankless plan` ended the script."""
    jobs: tuple[PlannedJob, ...]
    """In order of capture; a job with several kinds of calls appears once for each."""
    not_reached: tuple[DefinedJob, ...]
    """Jobs that the script defined but did not call."""
    without_program: tuple[DefinedJob, ...]
    """Jobs that the script called and that are not compiled: in the mirrored view, or with `capture=False`."""
    recorded_steps: tuple[PlannedStep, ...] = ()
    """The last step of a script in the logical view, and of each job that is no program and runs in this view."""


def make_plan_report(facts: Iterable[ProgramRecord], *, workers: int, steps: int, servers: int = 0) -> PlanReport:
    """Make the report from the facts that a run recorded about its jobs."""
    known = list(facts)
    compiled = {(fact.job, fact.line) for fact in known if isinstance(fact, JobProgram)}
    memory = {(fact.job, fact.line): fact.memory for fact in known if isinstance(fact, DefinedJob)}
    called = [fact for fact in known if isinstance(fact, DefinedJob) and fact.called]
    recorded = [fact for fact in known if isinstance(fact, RecordedStep)]
    names = {fact.job for fact in recorded}
    return PlanReport(
        workers=workers,
        servers=servers,
        steps=steps,
        jobs=tuple(
            PlannedJob(
                program=fact,
                moved_bytes=sum(move.bytes for move in fact.moves),
                sent_bytes=sum(move.sent_bytes for move in fact.moves),
                gathered_bytes=sum(move.bytes for move in fact.moves if move.gathered),
                gather_places=list_gather_places(fact),
                memory=memory.get((fact.job, fact.line)),
            )
            for fact in known
            if isinstance(fact, JobProgram)
        ),
        not_reached=tuple(fact for fact in known if isinstance(fact, DefinedJob) and not fact.called),
        without_program=tuple(
            fact for fact in called if (fact.job, fact.line) not in compiled and fact.job not in names
        ),
        recorded_steps=tuple(map(make_planned_step, recorded)),
    )


def make_planned_step(recorded: RecordedStep) -> PlannedStep:
    """Return a recorded step with its totals."""
    return PlannedStep(
        recorded=recorded,
        divided_calls=sum(item.count for item in recorded.calls if item.kind == "divided"),
        whole_calls=sum(item.count for item in recorded.calls if item.kind in ("whole", "plain")),
        moved_bytes=sum(move.count * move.bytes for move in recorded.moves),
        sent_bytes=sum(move.count * move.sent_bytes for move in recorded.moves),
        gathered_bytes=sum(move.count * move.bytes for move in recorded.moves if move.gathered),
    )


def render_plan(report: PlanReport, width: int = WIDTH) -> str:
    """Format all jobs, one below the other, wrapped to `width` columns, at least 40. Nothing is cut off."""
    lines = [line for job in report.jobs for line in ("", *_render_job(job, report.servers, max(width, MIN_WIDTH)))]
    for step in report.recorded_steps:
        lines += ["", *_render_step(step, report, max(width, MIN_WIDTH))]
    steps = format_count(report.steps, "training step")
    texts = [f"{_name(job)} was not called within {steps}; increase --steps" for job in report.not_reached]
    texts += [
        f"{_name(job)} is not compiled, so it has no plan: view='mirrored' or capture=False"
        for job in report.without_program
    ]
    lines += [line for text in texts for line in ("", *_wrap(text, max(width, MIN_WIDTH)))]
    return "\n".join(lines)


def _render_step(step: PlannedStep, report: PlanReport, width: int) -> Iterator[str]:
    """Yield the lines of a step of an ordinary loop, of the report of so many workers and steps."""
    recorded, calls = step.recorded, step.recorded.calls
    yield from _wrap(_describe_step(recorded, report.steps), width)
    for kind in ("parameter", "frozen parameter", "buffer", "batch tensor"):
        for text in _describe_inputs(kind, [item for item in recorded.inputs if item.kind == kind]):
            yield from _wrap(text, width, indent=2)
    total = step.divided_calls + step.whole_calls
    share = f" ({step.divided_calls / total:.0%})" if total else ""
    sums = sum(item.count for item in calls if item.kind == "sum")
    rest = f", and {format_count(sums, 'call')} with sums over the rows" if sums else ""
    yield from _wrap(f"calls that divide their rows: {step.divided_calls} of {total}{share}{rest}", width, indent=2)
    yield from _render_calls([item for item in calls if item.kind == "divided"], width)
    whole = [item for item in calls if item.kind in ("whole", "plain")]
    if whole:
        yield from _wrap("every worker computes whole values:", width, indent=2)
        yield from _render_calls(whole, width)
    if not (step.divided_calls or any(item.kind == "batch tensor" for item in recorded.inputs)):
        yield from _wrap(NOTHING_DIVIDED, width, indent=2)
    if recorded.moves:
        yield from _wrap("data moved, in order of first start (~ overlaps with computation):", width, indent=2)
        yield from _render_moves([move for move in recorded.moves for _ in range(move.count)], width)
    count = sum(move.count for move in recorded.moves)
    yield from _wrap(_describe_total(count, step.moved_bytes, step.sent_bytes), width, indent=2)
    gathered = format_decimal_bytes(step.gathered_bytes) if step.gathered_bytes else "none"
    yield from _wrap(f"gathered on every worker: {gathered}", width, indent=2)


NOTHING_DIVIDED = (
    "nothing is divided: every worker computes whole batches, correct but not faster with more workers; read the data "
    "with a DataLoader, or divide a batch with x = rankless.shard_batch(x)"
)


def _describe_step(recorded: RecordedStep, asked: int) -> str:
    """Describe which step was recorded, of so many that were asked for."""
    name = "ordinary loop" if recorded.job == "script" else f"job {recorded.job}, which is no program"
    place = f" ({os.path.basename(recorded.line)})" if recorded.line else ""
    if recorded.step == 0:
        return f"{name}: the script ended without backward() and a step of an optimizer; this is all that it ran"
    ended = f"; the script ended before step {asked}" if recorded.step < asked and recorded.job == "script" else ""
    return f"{name}, step {recorded.step}{place}{ended}"


def _render_calls(calls: Sequence[CountedCall], width: int) -> Iterator[str]:
    """Yield the calls of a step by line: how many, of which functions, in which modules, and why they are whole."""
    groups: dict[tuple[str, str], list[CountedCall]] = {}
    for item in calls:
        groups.setdefault((item.line, item.reason), []).append(item)
    for (line, reason), members in groups.items():
        names = list(dict.fromkeys(item.function for item in members))
        shown = ", ".join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" * (len(names) > NAMES_SHOWN))
        modules = format_modules((item.module, item.module_type) for item in members)
        text = (
            f"{os.path.basename(line)}: {shown}{f' in {modules}' if modules else ''}{f': {reason}' if reason else ''}"
        )
        yield from _hang(f"{sum(item.count for item in members):>9}", text, width)


def _render_job(job: PlannedJob, servers: int, width: int) -> Iterator[str]:
    """Yield the lines of a job, whose tables have their rows on some servers, if there are any."""
    program = job.program
    kind = "train job" if program.trains else "predict job"
    yield from _wrap(f"{kind} {program.job} ({os.path.basename(program.line)}): {program.operators} operators", width)
    for kind in ("argument", "parameter", "buffer", "constant"):
        for text in _describe_inputs(kind, [item for item in program.inputs if item.kind == kind]):
            yield from _wrap(text, width, indent=2)
    if program.pipeline is not None:
        yield from _render_pipeline(program.pipeline, width)
    if program.moves:
        step = f" ({program.calls_per_step} calls make a step)" if program.calls_per_step > 1 else ""
        title = f"data moved per call{step}, in order of start (~ overlaps with computation):"
        yield from _wrap(title, width, indent=2)
        yield from _render_moves(program.moves, width)
    if program.lookups:
        yield from _render_lookups(program, servers, width)
    rows = list(render_modules(group_by_module(program)))
    if rows:
        yield "  by module:"
        for row in rows:
            yield from _hang("    ", row, width)
    total = _describe_total(len(program.moves), job.moved_bytes, job.sent_bytes)
    for text in (total, _describe_gathers(program)):
        yield from _wrap(text, width, indent=2)
    if job.memory is not None:
        yield from _wrap(_describe_memory(job.memory), width, indent=2)
    if program.recomputed:
        count = format_count(program.recomputed, "operator")
        yield from _wrap(f"computed again for gradients, to save memory: {count}", width, indent=2)
    for place in job.gather_places:
        yield from _wrap(f"{os.path.basename(place.line)}: {describe_gather_place(place)}", width, indent=4)
    yield from _wrap(_describe_operators_without_rule(program), width, indent=2)
    if program.probed:
        yield from _wrap(_describe_probed_operators(program), width, indent=2)


def _render_pipeline(pipeline: PipelineRecord, width: int) -> Iterator[str]:
    """Yield what is known of the stages of a pipeline."""
    head = (
        f"pipeline: {format_count(len(pipeline.stages), 'stage')}, schedule {pipeline.schedule}, "
        f"{format_count(pipeline.microbatches, 'microbatch')}; with equal stages workers wait "
        f"{pipeline.idle_fraction:.0%} of the time"
    )
    yield from _wrap(head, width, indent=2)
    for number, stage in enumerate(pipeline.stages):
        held = stage.held_microbatches
        activations = f"; holds activations of {format_count(held, 'microbatch')}" if held else ""
        yield from _wrap(
            f"stage {number} on {_list_workers(stage.workers)}, from {stage.begins or 'the start'}: "
            f"{format_count(stage.operators, 'operator')}, {format_count(stage.parameters, 'parameter')}, "
            f"{format_decimal_bytes(stage.parameter_bytes)}{activations}",
            width,
            indent=4,
        )


def _render_lookups(program: JobProgram, servers: int, width: int) -> Iterator[str]:
    """Yield the lookups of rows in tables. Equal ones share a line."""
    if servers:
        move = "read the rows of different ids" + ", and send their gradients" * program.trains
        head = f"rows of tables, on {format_count(servers, 'server')}: in a call workers {move}"
    else:
        move = ": in a call each sends the gradients of its different ids to all" if program.trains else ""
        head = f"rows of tables, all in every worker{move}"
    yield from _wrap(head, width, indent=2)
    groups: dict[tuple[object, ...], list[TableLookup]] = {}
    for lookup in program.lookups:
        groups.setdefault((lookup.line, lookup.ids, lookup.row_bytes), []).append(lookup)
    for members in groups.values():
        lookup, count = members[0], len(members)
        modules = format_modules((item.module, item.module_type) for item in members)
        size = format_decimal_bytes(lookup.ids * lookup.row_bytes)
        each = f"{format_count(count, 'lookup')} of at most {lookup.ids:,} ids, {size}{' each' if count > 1 else ''}"
        text = f"{os.path.basename(lookup.line)}: {each}{f', in {modules}' if modules else ''}"
        yield from _wrap(text, width, indent=4)


def _list_workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _describe_total(moves: int, moved_bytes: int, sent_bytes: int) -> str:
    """Describe how much moves in a call or a step."""
    if not moves:
        return "total: nothing moves"
    return (
        f"total: {format_count(moves, 'move')}, {format_decimal_bytes(moved_bytes)} of values; "
        f"each worker sends {format_decimal_bytes(sent_bytes)} (ring collectives)"
    )


def _describe_memory(memory: JobMemory) -> str:
    """Describe what a worker holds of a job."""
    kinds = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
        "copies": memory.copies,
        "activations": memory.activations or 0,
    }
    parts = [f"{name} {format_decimal_bytes(size)}" for name, size in kinds.items() if size]
    place = "; what zero= divides lies in the memory of the host" if memory.is_offloaded else ""
    return f"memory per worker: {', '.join(parts) or 'none'}{place}"


def _describe_gathers(program: JobProgram) -> str:
    """Describe which split values every worker gets in full, and what it costs."""
    parts = []
    inputs = [move for move in program.moves if move.gathered and move.purpose != "output"]
    outputs = [move for move in program.moves if move.gathered and move.purpose == "output"]
    if inputs:
        size = format_decimal_bytes(sum(move.bytes for move in inputs))
        parts.append(f"{format_count(len(inputs), 'value')}, {size}")
    if program.whole_operators:
        parts.append(f"every worker computes {program.whole_operators} of {program.operators} operators in full")
    if outputs:
        size = format_decimal_bytes(sum(move.bytes for move in outputs))
        parts.append(f"{format_count(len(outputs), 'output')} of the job, {size}")
    return f"gathered on every worker: {'; '.join(parts) or 'none'}"


def _describe_operators_without_rule(program: JobProgram) -> str:
    """Describe the operators that every worker computes in full because Rankless has no sharding rule."""
    operators = _list_operators(program.without_rule)
    if not operators:
        return "operators without a sharding rule: none"
    return f"operators without a sharding rule, computed in full: {len(operators)}: {', '.join(operators)}"


def _describe_probed_operators(program: JobProgram) -> str:
    """Describe the operators without a sharding rule that are split all the same."""
    operators = _list_operators(program.probed)
    return f"without a sharding rule, split as sample data showed: {len(operators)}: {', '.join(operators)}"


def _list_operators(items: Sequence[ReplicatedOperator | ProbedOperator]) -> list[str]:
    """Return each operator with its line and module."""
    return [
        f"{item.operator} ({os.path.basename(item.line)}{f', {item.module}' if item.module else ''})" for item in items
    ]


def _describe_inputs(kind: str, items: Sequence[ProgramInputRecord]) -> Iterator[str]:
    """Yield one text for each placement of the inputs of one kind."""
    groups: dict[str, list[ProgramInputRecord]] = {}
    for item in items:
        groups.setdefault(item.placement, []).append(item)
    for placement, members in groups.items():
        size = format_decimal_bytes(sum(item.bytes for item in members))
        yield f"{format_count(len(members), kind)}, {size}: {placement}"


def _render_moves(moves: Sequence[ProgramCommunication], width: int) -> Iterator[str]:
    """Yield the moves; equal moves, such as those of repeated layers, share a row."""
    yield from _hang(f"{'':9}{'kind':10} {'value':>7} {'sent':>7}", "line: why", width)
    groups: dict[tuple[object, ...], list[ProgramCommunication]] = {}
    for move in moves:
        names = move.value if move.purpose == "gradient" else ""
        key = (move.kind, move.bytes, move.sent_bytes, move.line, move.reason, move.backward, names)
        groups.setdefault(key, []).append(move)
    for members in groups.values():
        move, count = members[0], len(members)
        head = (
            f"{f'{count} x' if count > 1 else '':>6} {'~' if move.overlapped else ' '} {move.kind:10} "
            f"{format_decimal_bytes(move.bytes):>7} {format_decimal_bytes(move.sent_bytes):>7}"
        )
        yield from _hang(head, f"{os.path.basename(move.line)}: {_describe_reason(members)}", width)


def _describe_reason(moves: Sequence[ProgramCommunication]) -> str:
    """Describe what needs some equal moves, in the names of the user's model."""
    move = moves[0]
    if move.purpose == "gradient":
        names = move.value.split(", ")
        return f"{move.reason}: {', '.join(names if len(names) <= NAMES_SHOWN else [names[0], '…', names[-1]])}"
    if move.purpose == "output" and not isinstance(move, CountedMove):
        return f"{move.reason} of the job, whole on every worker"
    modules = format_modules((item.module, item.module_type) for item in moves)
    return f"{move.reason}{f' in {modules}' if modules else ''}{', backward' if move.backward else ''}"


def _hang(head: str, text: str, width: int) -> Iterator[str]:
    """Yield a row whose last column is wrapped; on a narrow terminal this column starts on the next line."""
    column = len(head) + 2
    if width - column < MIN_LAST_COLUMN:
        yield head
        yield from _wrap(text, width, indent=NARROW_INDENT)
        return
    first, *rest = _wrap(text, width - column)
    yield f"{head}  {first}"
    yield from (" " * column + line for line in rest)


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap a text; its lines but the first are indented by two columns more."""
    start = " " * indent
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start + "  ", break_on_hyphens=False)


def _name(job: DefinedJob) -> str:
    return f"job {job.job} ({os.path.basename(job.line)})"


def render_modules(groups: Sequence[ModuleGroup]) -> Iterator[str]:
    """Yield a row for each group under a title; nothing for a single group."""
    if len(groups) < 2:
        return
    totals = [group.sent_bytes for group in groups]
    axes = list(dict.fromkeys(axis for sent in totals for axis in sent))
    titles = ["parameters", *(f"sent along {axis}" for axis in axes)]
    yield "  ".join([*(f"{title:>{_COLUMN_WIDTH}}" for title in titles), "module"])
    for group, sent in zip(groups, totals, strict=True):
        sizes = [group.parameter_bytes, *(sent.get(axis, 0) for axis in axes)]
        cells = [format_decimal_bytes(size) if size else "-" for size in sizes]
        columns = [f"{cell:>{max(_COLUMN_WIDTH, len(title))}}" for cell, title in zip(cells, titles, strict=True)]
        yield "  ".join([*columns, group.label])
