"""Lay out the picture of a job, and of all jobs of a script."""

from collections.abc import Sequence

from rankless.plan_picture.drawing_parts_and_text_fit import (
    GAP,
    Area,
    Bar,
    Drawing,
    Label,
    fit_label,
    measure_text,
    scale,
    wrap_texts,
)
from rankless.plan_picture.holdings import (
    HeldTensor,
    Holding,
    WorkerGrid,
    count_held,
    describe_divisions,
    format_axes,
    format_workers,
)
from rankless.plan_picture.picture_data import PicturedJob, PicturedModule, PicturedMove, PicturedPlan, WorkerMemory
from rankless.records.job_programs import PipelineRecord, PipelineUnit
from rankless.records.number_formatting import format_decimal_bytes

WIDTH = 1320
MARGIN = 24
INNER = WIDTH - 2 * MARGIN
HALF = (INNER - MARGIN) / 2
SPACE = 20
"""Between sections."""


def draw_plan(plan: PicturedPlan) -> Drawing:
    """Return the picture of all jobs, one below the other."""
    drawing = Drawing(width=WIDTH)
    for job in plan.jobs:
        draw_job(drawing, job)
    for text in plan.others:
        drawing.height += SPACE
        drawing.add(fit_label(Label(x=MARGIN, y=drawing.height, text=text, style="muted"), INNER))
    drawing.height += MARGIN
    return drawing


def draw_one_job(job: PicturedJob) -> Drawing:
    """Return the picture of one job."""
    drawing = Drawing(width=WIDTH)
    draw_job(drawing, job)
    drawing.height += MARGIN
    return drawing


def draw_job(drawing: Drawing, job: PicturedJob) -> None:
    """Add a job below what a picture has."""
    y = drawing.height + MARGIN + 16
    drawing.add(fit_label(Label(x=MARGIN, y=y, text=job.title, size=20, style="heading"), INNER))
    for line in wrap_texts([summarize(job), *job.inputs], INNER):
        y += 20
        drawing.add(fit_label(Label(x=MARGIN, y=y, text=line, style="muted"), INNER))
    y += SPACE
    ends = [
        draw_mesh(drawing, job, Area(x=MARGIN, y=y, width=HALF)),
        draw_memory(drawing, job, Area(x=MARGIN + HALF + MARGIN, y=y, width=HALF)),
    ]
    y = max(ends) + SPACE
    if job.pipeline is not None:
        axis = next((axis.name for axis in job.grid.axes if axis.role == "pipeline"), "worker")
        y = draw_timeline(drawing, job.pipeline, axis, Area(x=MARGIN, y=y, width=INNER)) + SPACE
    drawing.height = draw_modules(drawing, job, Area(x=MARGIN, y=y, width=INNER))


def summarize(job: PicturedJob) -> str:
    """Return a job in one sentence."""
    moves = len(job.program.moves)
    moved = f"{moves} move{'s' if moves > 1 else ''}, each worker sends {format_decimal_bytes(job.sent_bytes)} per call"
    return (
        f"{job.grid.count} worker{'s' if job.grid.count > 1 else ''}: {format_axes(job.grid.axes)} · "
        f"{job.program.operators} operators · {moved if moves else 'nothing moves'}"
    )


ROW = 26
STAGE_NAME_WIDTH = 170
WIDEST_SLOT = 34
UNIT_STYLES = {"forward": "unit-forward", "backward": "unit-backward", "weights": "unit-weights"}
UNIT_NAMES = {"forward": "forward", "backward": "backward", "weights": "gradients of parameters"}


def draw_timeline(drawing: Drawing, pipeline: PipelineRecord, axis: str, area: Area) -> float:
    """Draw the simulated step of a pipeline along an axis of the mesh, and return where the section ends."""
    text = (
        f"Schedule {pipeline.schedule}: {len(pipeline.stages)} stages, {pipeline.microbatches} microbatches; "
        f"with equal stages workers wait {pipeline.idle_fraction:.0%} of the time"
    )
    heading = Label(x=area.x, y=area.y + 14, text=text, size=14, style="heading")
    drawing.add(fit_label(heading, area.width))
    slots = max((unit.end for units in pipeline.timeline for unit in units), default=0)
    if not slots:
        return area.y + 24
    y = area.y + 26
    slot = min(WIDEST_SLOT, (area.width - STAGE_NAME_WIDTH) / slots)
    widest = measure_text("0" * len(str(pipeline.microbatches - 1)), 11) + 1
    for worker, units in enumerate(pipeline.timeline):
        stages = [number for number, stage in enumerate(pipeline.stages) if worker in stage.workers]
        name = f"{axis} {worker}: {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        drawing.add(
            fit_label(Label(x=area.x, y=y + 16, text=name), STAGE_NAME_WIDTH - GAP),
            Bar(x=area.x + STAGE_NAME_WIDTH, y=y, width=slots * slot, height=ROW - 4, style="waiting"),
        )
        for unit in units:
            place = Area(x=area.x + STAGE_NAME_WIDTH, y=y, width=slot)
            draw_unit(drawing, unit, place, is_later=unit.stage != min(stages, default=0), widest=widest)
        y += ROW
    kinds = [kind for kind in UNIT_NAMES if any(unit.kind == kind for units in pipeline.timeline for unit in units)]
    workers = [worker for stage in pipeline.stages for worker in stage.workers]
    has_later = len(set(workers)) < len(workers)
    return draw_unit_legend(
        drawing, kinds, Area(x=area.x + STAGE_NAME_WIDTH, y=y, width=area.width), has_later=has_later
    )


def draw_unit(drawing: Drawing, unit: PipelineUnit, row: Area, *, is_later: bool, widest: float) -> None:
    """Draw a unit with the number of its microbatch, if there is room for all numbers.

    Args:
        drawing: The picture.
        unit: The unit.
        row: The line of its worker, with the width of a slot.
        is_later: Whether it is not of the first stage of its worker.
        widest: The width of the greatest number.
    """
    x, width = row.x + unit.begin * row.width, (unit.end - unit.begin) * row.width
    title = f"{UNIT_NAMES[unit.kind]} of microbatch {unit.microbatch} in stage {unit.stage}"
    inset = min(1.0, width / 10)
    drawing.add(
        Bar(
            x=x + inset, y=row.y + 1, width=width - 2 * inset, height=ROW - 6, style=UNIT_STYLES[unit.kind], title=title
        )
    )
    if is_later:
        drawing.add(Bar(x=x + inset, y=row.y + 1, width=width - 2 * inset, height=3, style="later", title=title))
    number = str(unit.microbatch)
    if widest <= width:
        drawing.add(Label(x=x + width / 2, y=row.y + 15, text=number, size=11, anchor="middle", title=title))


def draw_unit_legend(drawing: Drawing, kinds: list[str], area: Area, *, has_later: bool) -> float:
    """Draw what the colours stand for, and return where it ends."""
    x, y = area.x, area.y + 16
    entries = [(UNIT_STYLES[kind], UNIT_NAMES[kind]) for kind in kinds]
    entries += [("waiting", "waiting")]
    entries += [("later", "line above: a later stage of the same worker")] if has_later else []
    for style, name in entries:
        height = 3 if style == "later" else 11
        label = Label(x=x + 17, y=y, text=name)
        drawing.add(Bar(x=x, y=y - 10, width=12, height=height, style=style), label)
        x = label.x + label.width + 2 * GAP
    note = Label(x=x, y=y, text="numbers: microbatches", style="muted")
    drawing.add(note)
    return y + GAP


COLUMNS = 16
"""The most workers in a line; more are wrapped."""
LABEL_WIDTH = 96
"""Left of the cells, for the ranks along the axis of the rows."""
WIDEST = 124
TWO_LINES = 64
"""The width from which a cell has room for what the worker holds."""


def draw_mesh(drawing: Drawing, job: PicturedJob, area: Area) -> float:
    """Draw the workers of a job, and return where the section ends."""
    grid = job.grid
    heading = Label(x=area.x, y=area.y + 14, text=f"Mesh: {format_axes(grid.axes)}", size=14, style="heading")
    drawing.add(fit_label(heading, area.width))
    texts = describe_workers(job)
    end = area.y + 24
    for block in grid.list_blocks():
        names = [f"{axis.name} {rank}" for axis, rank in zip(grid.axes[:-2], block, strict=True)]
        if names:
            end += 18
            drawing.add(fit_label(Label(x=area.x, y=end, text=", ".join(names), style="muted"), area.width))
            end += 4
        end = draw_block(drawing, grid, block, texts, Area(x=area.x, y=end, width=area.width)) + GAP
    if measure_cell(grid, area) < TWO_LINES:
        return end
    note = Label(x=area.x, y=end + 8, text="bytes: what a worker holds of the parameters", size=11, style="muted")
    drawing.add(fit_label(note, area.width))
    return end + 12


def measure_cell(grid: WorkerGrid, area: Area) -> float:
    """Return the width of a worker's cell."""
    return min(WIDEST, (area.width - LABEL_WIDTH) / min(grid.axes[-1].size, COLUMNS))


def describe_workers(job: PicturedJob) -> list[tuple[str, str]]:
    """Return for each worker a short text and a whole one."""
    tensors: list[HeldTensor] = [tensor for module in job.modules for tensor in module.tensors]
    sizes = count_held(tensors, job.grid, "parameters")
    stages = find_stages(job)
    texts = []
    for worker, size in enumerate(sizes):
        ranks = ", ".join(f"{axis} {rank}" for axis, rank in job.grid.find_ranks(worker).items())
        held, stage = format_decimal_bytes(size), stages.get(worker, "")
        texts.append(
            (f"{stage}: {held}" if stage else held, f"worker {worker}: {ranks}; holds {held} of the parameters")
        )
    return texts


def find_stages(job: PicturedJob) -> dict[int, str]:
    """Return for each worker of a pipeline its stages, as "stage 1"."""
    axis = next((axis.name for axis in job.grid.axes if axis.role == "pipeline"), None)
    if job.pipeline is None or axis is None:
        return {}
    stages: dict[int, list[str]] = {}
    for number, stage in enumerate(job.pipeline.stages):
        for worker in stage.workers:
            stages.setdefault(worker, []).append(str(number))
    places = {worker: job.grid.find_ranks(worker)[axis] for worker in range(job.grid.count)}
    return {
        worker: f"stage{'s' if len(stages[place]) > 1 else ''} {', '.join(stages[place])}"
        for worker, place in places.items()
        if place in stages
    }


def draw_block(
    drawing: Drawing, grid: WorkerGrid, block: tuple[int, ...], texts: Sequence[tuple[str, str]], area: Area
) -> float:
    """Draw the workers that have the same ranks along all axes but the last two, and return where they end."""
    *_, columns = grid.axes
    rows = grid.axes[-2] if len(grid.axes) > 1 else None
    in_line = min(columns.size, COLUMNS)
    width = measure_cell(grid, area)
    height = 38 if width >= TWO_LINES else 24
    left, y = area.x + LABEL_WIDTH, area.y + 16
    title = Label(x=left, y=y, text=f"{columns.name} →", style="muted")
    drawing.add(fit_label(title, area.width - LABEL_WIDTH))
    if rows is not None:
        drawing.add(fit_label(Label(x=area.x, y=y, text=f"{rows.name} ↓", style="muted"), LABEL_WIDTH - GAP))
    y += 8
    for row in range(rows.size if rows is not None else 1):
        if rows is not None:
            name = Label(x=left - GAP, y=y + height / 2 + 4, text=f"{rows.name} {row}", style="muted", anchor="end")
            drawing.add(fit_label(name, LABEL_WIDTH - GAP))
        for column in range(columns.size):
            line, place = divmod(column, in_line)
            ranks = (*block, *([row] if rows is not None else []), column)
            worker = grid.find_worker(ranks)
            cell = Area(x=left + place * width, y=y + line * height, width=width)
            draw_worker(drawing, cell, height, f"{worker}", texts[worker])
        y += height * -(-columns.size // in_line) + 4
    return y


def draw_worker(drawing: Drawing, cell: Area, height: float, name: str, texts: tuple[str, str]) -> None:
    """Draw a worker with what it holds, if there is room."""
    held, title = texts
    drawing.add(Bar(x=cell.x + 1, y=cell.y + 1, width=cell.width - 2, height=height - 2, style="worker", title=title))
    middle, room = cell.x + cell.width / 2, cell.width - 4
    if cell.width < TWO_LINES:
        label = Label(x=middle, y=cell.y + height / 2 + 4, text=name, size=11, anchor="middle")
        drawing.add(fit_label(label, room, title=title))
        return
    drawing.add(
        fit_label(Label(x=middle, y=cell.y + 16, text=f"worker {name}", anchor="middle"), room, title=title),
        fit_label(Label(x=middle, y=cell.y + 31, text=held, size=11, anchor="middle"), room, title=title),
    )


LINE = 20
NAME = (0, 196)
"""Left edge and width of a column, from the left edge of the section."""
PARAMETERS = (204, 84)
STRIP = (306, 84)
HELD = (398, 220)
KIND = (636, 124)
AXIS = (766, 72)
DIRECTION = (844, 62)
SENT = (912, 84)
SENT_TEXT = (1060, 58)
"""Its texts end at the left edge."""
SCRIPT_LINE = (1072, 200)
AXIS_STYLES = 6
TENSORS_IN_TITLE = 12


def draw_modules(drawing: Drawing, job: PicturedJob, area: Area) -> float:
    """Draw the modules of a job, and return where the section ends."""
    drawing.add(
        Label(x=area.x, y=area.y + 14, text="Modules: who holds what, and what moves", size=14, style="heading")
    )
    y = draw_titles(drawing, area)
    most_held = max((module.parameter_bytes for module in job.modules), default=0)
    most_sent = max((move.sent_bytes for module in job.modules for move in module.moves), default=0)
    styles = {axis.name: f"axis-{number % AXIS_STYLES}" for number, axis in enumerate(job.grid.axes)}
    for module in job.modules:
        drawing.add(Bar(x=area.x, y=y, width=area.width, height=1, style="rule"))
        row = Area(x=area.x, y=y + 4, width=area.width)
        draw_name(drawing, module, most_held, row)
        lines = draw_holdings(drawing, module, row)
        for number, move in enumerate(module.moves):
            style = styles.get(move.axis.split(", ")[0], "axis-none")
            line = Area(x=area.x, y=row.y + number * LINE, width=area.width)
            draw_move(drawing, move, f"{style} sent", most_sent, line)
        y = row.y + max(lines, len(module.moves), 1) * LINE + 6
    return draw_notes(drawing, job, Area(x=area.x, y=y, width=area.width))


def draw_titles(drawing: Drawing, area: Area) -> float:
    """Draw the titles of the columns, and return where they end."""
    y = area.y + 38
    titles = [
        (NAME, "module"),
        (PARAMETERS, "parameters"),
        (STRIP, "on worker"),
        (HELD, "held by"),
        (KIND, "movement"),
        (AXIS, "along"),
        (DIRECTION, "pass"),
        (SENT, "sent per call"),
        (SCRIPT_LINE, "line"),
    ]
    drawing.add(*(Label(x=area.x + x, y=y, text=text, style="muted") for (x, _), text in titles))
    return y + GAP


def draw_name(drawing: Drawing, module: PicturedModule, most: int, row: Area) -> None:
    """Draw the name of a module, and the size of its parameters."""
    drawing.add(fit_label(Label(x=row.x + NAME[0], y=row.y + 14, text=module.name), NAME[1]))
    if not module.tensors:
        return
    size = format_decimal_bytes(module.parameter_bytes)
    title = f"parameters of {module.name}: {size}"
    left, width = PARAMETERS
    drawing.add(
        fit_label(Label(x=row.x + left, y=row.y + 14, text=size), width),
        Bar(
            x=row.x + left,
            y=row.y + 18,
            width=scale(module.parameter_bytes, most, width),
            height=5,
            style="parameters",
            title=title,
            amount=module.parameter_bytes,
        ),
    )


def draw_holdings(drawing: Drawing, module: PicturedModule, row: Area) -> int:
    """Draw who holds a module's parameters, and return the number of lines."""
    lines = 0
    title = describe_tensors(module)
    for holding in module.holdings:
        draw_strip(drawing, holding, Area(x=row.x + STRIP[0], y=row.y + lines * LINE, width=STRIP[1]))
        text = holding.text
        if len(module.holdings) > 1:
            drawing.add(
                fit_label(
                    Label(x=row.x + HELD[0], y=row.y + lines * LINE + 14, text=f"{', '.join(holding.kinds)}:"), HELD[1]
                )
            )
            lines += 1
        drawing.add(fit_label(Label(x=row.x + HELD[0], y=row.y + lines * LINE + 14, text=text), HELD[1], title=title))
        lines += 1
    return lines


def draw_strip(drawing: Drawing, holding: Holding, area: Area) -> None:
    """Draw a box for each worker, filled as far as it holds the parameters."""
    width = min(18.0, area.width / len(holding.held_bytes))
    gap = min(1.0, width / 6)
    for worker, size in enumerate(holding.held_bytes):
        title = f"worker {worker} holds {format_decimal_bytes(size)} of {format_decimal_bytes(holding.whole_bytes)}"
        x, height = area.x + worker * width + gap, scale(size, holding.whole_bytes, 14)
        height = max(height, 2.0) if size else 0.0
        drawing.add(Bar(x=x, y=area.y + 3, width=width - 2 * gap, height=14, style="empty", title=title))
        if height:
            filled = Bar(x=x, y=area.y + 17 - height, width=width - 2 * gap, height=height, style="held", title=title)
            drawing.add(filled)


def describe_tensors(module: PicturedModule) -> str:
    """Describe how each parameter of a module is held."""
    shown = module.tensors[:TENSORS_IN_TITLE]
    texts = [f"{item.name}: {describe_divisions(item.list_divisions('parameters'))}" for item in shown]
    others = len(module.tensors) - len(shown)
    return "; ".join([*texts, *([f"and {others} more"] if others else [])])


def draw_move(drawing: Drawing, move: PicturedMove, style: str, most: int, row: Area) -> None:
    """Draw a movement, whose bar is in proportion to `most`."""
    sent = format_decimal_bytes(move.sent_bytes)
    title = (
        f"{move.name} along {move.axis or 'no axis'}, {move.direction}: each worker sends {sent}, values of "
        f"{format_decimal_bytes(move.value_bytes)}, {move.line}: {'; '.join(move.reasons)}"
    )
    y = row.y + 14
    columns: Sequence[tuple[tuple[int, int], str]] = (
        (KIND, move.name),
        (AXIS, move.axis or "-"),
        (DIRECTION, move.direction),
        (SCRIPT_LINE, move.line),
    )
    for (left, width), text in columns:
        drawing.add(fit_label(Label(x=row.x + left, y=y, text=text), width, title=title))
    drawing.add(
        Bar(
            x=row.x + SENT[0],
            y=row.y + 4,
            width=scale(move.sent_bytes, most, SENT[1]),
            height=12,
            style=style,
            title=title,
            amount=move.sent_bytes,
        ),
        fit_label(Label(x=row.x + SENT_TEXT[0], y=y, text=sent, anchor="end"), SENT_TEXT[1], title=title),
    )


def draw_notes(drawing: Drawing, job: PicturedJob, area: Area) -> float:
    """Write what the table does not have, and return where it ends."""
    y = area.y
    notes = []
    if job.unused:
        size = format_decimal_bytes(sum(item.bytes for item in job.unused))
        names = ", ".join(item.name for item in job.unused)
        notes.append(f"not used by this program: {size} in {names}")
    if job.pipeline is not None and len(job.grid.axes) > 1:
        notes.append("Sums of gradients are those of worker 0. Workers of other stages sum their own likewise.")
    for note in notes:
        y += 18
        drawing.add(fit_label(Label(x=area.x, y=y, text=note, style="muted"), area.width))
    return y + GAP


KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")
MEMORY_NAME_WIDTH = 132
TOTAL_WIDTH = 72
DETAILED = 4
"""The most bars below which the sizes stand in words."""
NOTES = (
    "measured on worker 0; activations are the peak of a call",
    "workers that hold as much, to 2%, are one bar",
)
NOTE_ESTIMATED = "others: from the plan, in proportion to worker 0; activations not known"


def draw_memory(drawing: Drawing, job: PicturedJob, area: Area) -> float:
    """Draw the memory of the workers of a job, and return where the section ends."""
    drawing.add(Label(x=area.x, y=area.y + 14, text="Memory per worker", size=14, style="heading"))
    if not job.memory:
        drawing.add(Label(x=area.x, y=area.y + 36, text="not measured", style="muted"))
        return area.y + 44
    kinds = [kind for kind in KINDS if any(kind in group.sizes for group in job.memory)]
    y = draw_legend(drawing, kinds, Area(x=area.x, y=area.y + 34, width=area.width))
    most = max(group.total for group in job.memory)
    for group in job.memory:
        y = draw_bar(drawing, group, most, Area(x=area.x, y=y, width=area.width))
        if len(job.memory) <= DETAILED:
            y = draw_sizes(
                drawing, group, Area(x=area.x + MEMORY_NAME_WIDTH, y=y, width=area.width - MEMORY_NAME_WIDTH)
            )
    notes = [*NOTES, *([NOTE_ESTIMATED] if any(not group.is_measured for group in job.memory) else [])]
    for note in notes:
        y += 16
        drawing.add(fit_label(Label(x=area.x, y=y, text=note, size=11, style="muted"), area.width))
    return y + GAP


def draw_legend(drawing: Drawing, kinds: list[str], area: Area) -> float:
    """Draw what the colours stand for, and return where it ends."""
    x, y = area.x, area.y
    for kind in kinds:
        label = Label(x=x + 16, y=y, text=kind)
        if label.x + label.width > area.x + area.width:
            x, y = area.x, y + 18
            label = Label(x=x + 16, y=y, text=kind)
        drawing.add(Bar(x=x, y=y - 10, width=11, height=11, style=name_style(kind)), label)
        x = label.x + label.width + 2 * GAP
    return y + GAP


def draw_bar(drawing: Drawing, group: WorkerMemory, most: int, area: Area) -> float:
    """Draw the memory of some workers in proportion to `most`, and return where it ends."""
    names = format_workers(group.workers)
    total = f"{'' if group.is_measured else '≥ '}{format_decimal_bytes(group.total)}"
    room = area.width - MEMORY_NAME_WIDTH - TOTAL_WIDTH - GAP
    drawing.add(
        fit_label(Label(x=area.x, y=area.y + 17, text=names), MEMORY_NAME_WIDTH - GAP),
        fit_label(Label(x=area.x + area.width, y=area.y + 17, text=total, anchor="end"), TOTAL_WIDTH),
    )
    x = area.x + MEMORY_NAME_WIDTH
    for kind in KINDS:
        size = group.sizes.get(kind, 0)
        width = scale(size, most, room)
        if size:
            title = f"{names}: {kind} {format_decimal_bytes(size)}{'' if group.is_measured else ', estimated'}"
            style = name_style(kind) + ("" if group.is_measured else " estimated")
            drawing.add(Bar(x=x, y=area.y + 4, width=width, height=17, style=style, title=title, amount=size))
        x += width
    return area.y + ROW


def draw_sizes(drawing: Drawing, group: WorkerMemory, area: Area) -> float:
    """Write the sizes of each kind, and return where they end."""
    y, line = area.y, ""
    texts = [f"{kind} {format_decimal_bytes(group.sizes[kind])}" for kind in KINDS if kind in group.sizes]
    for start in range(0, len(texts), 3):
        line = " · ".join(texts[start : start + 3])
        drawing.add(fit_label(Label(x=area.x, y=y + 10, text=line, size=11, style="muted"), area.width))
        y += 15
    return y + 2


def name_style(kind: str) -> str:
    """Return the class of a kind of memory."""
    return kind.replace(" ", "-")
