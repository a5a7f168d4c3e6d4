"""Lay out the picture of a job, and of all jobs of a script."""

from rankless.plan_picture.drawing import Area, Drawing, Label, fit_label, wrap_texts
from rankless.plan_picture.memory_section import draw_memory
from rankless.plan_picture.mesh_section import draw_mesh
from rankless.plan_picture.module_section import draw_modules
from rankless.plan_picture.pictured_job import PicturedJob, PicturedPlan
from rankless.plan_picture.timeline_section import draw_timeline
from rankless.plan_picture.worker_grid import format_axes
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
