"""Lay out the picture of a job, and of all jobs of a script."""

from collections.abc import Sequence

from rankless.plan_picture.drawing import GAP, Area, Bar, Drawing, Label, fit_label, wrap_texts
from rankless.plan_picture.holdings import HeldTensor, count_held
from rankless.plan_picture.memory_section import draw_memory
from rankless.plan_picture.module_section import draw_modules
from rankless.plan_picture.pictured_job import PicturedJob, PicturedPlan
from rankless.plan_picture.text_width import measure_text
from rankless.plan_picture.worker_grid import WorkerGrid, format_axes
from rankless.records.job_programs import PipelineRecord, PipelineUnit
from rankless.records.quantities import format_decimal_bytes

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
NAME_WIDTH = 170
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
    slot = min(WIDEST_SLOT, (area.width - NAME_WIDTH) / slots)
    widest = measure_text("0" * len(str(pipeline.microbatches - 1)), 11) + 1
    for worker, units in enumerate(pipeline.timeline):
        stages = [number for number, stage in enumerate(pipeline.stages) if worker in stage.workers]
        name = f"{axis} {worker}: {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        drawing.add(
            fit_label(Label(x=area.x, y=y + 16, text=name), NAME_WIDTH - GAP),
            Bar(x=area.x + NAME_WIDTH, y=y, width=slots * slot, height=ROW - 4, style="waiting"),
        )
        for unit in units:
            place = Area(x=area.x + NAME_WIDTH, y=y, width=slot)
            draw_unit(drawing, unit, place, is_later=unit.stage != min(stages, default=0), widest=widest)
        y += ROW
    kinds = [kind for kind in UNIT_NAMES if any(unit.kind == kind for units in pipeline.timeline for unit in units)]
    workers = [worker for stage in pipeline.stages for worker in stage.workers]
    has_later = len(set(workers)) < len(workers)
    return draw_unit_legend(drawing, kinds, Area(x=area.x + NAME_WIDTH, y=y, width=area.width), has_later=has_later)


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
