"""Draw the mesh of a job: its workers as a grid along the named axes."""

from collections.abc import Sequence

from rankless.plan_picture.drawing import GAP, Area, Bar, Drawing, Label, fit_label
from rankless.plan_picture.holdings import HeldTensor, count_held
from rankless.plan_picture.pictured_job import PicturedJob
from rankless.plan_picture.worker_grid import WorkerGrid, format_axes
from rankless.records.quantities import format_decimal_bytes

COLUMNS = 16
"""The most workers in a line; more are wrapped."""
MARGIN = 96
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
    return min(WIDEST, (area.width - MARGIN) / min(grid.axes[-1].size, COLUMNS))


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
    left, y = area.x + MARGIN, area.y + 16
    title = Label(x=left, y=y, text=f"{columns.name} →", style="muted")
    drawing.add(fit_label(title, area.width - MARGIN))
    if rows is not None:
        drawing.add(fit_label(Label(x=area.x, y=y, text=f"{rows.name} ↓", style="muted"), MARGIN - GAP))
    y += 8
    for row in range(rows.size if rows is not None else 1):
        if rows is not None:
            name = Label(x=left - GAP, y=y + height / 2 + 4, text=f"{rows.name} {row}", style="muted", anchor="end")
            drawing.add(fit_label(name, MARGIN - GAP))
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
