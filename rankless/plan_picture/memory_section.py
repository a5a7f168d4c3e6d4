"""Draw the memory of each worker as a stacked bar."""

from rankless.plan_picture.drawing import GAP, Area, Bar, Drawing, Label, fit_label, scale
from rankless.plan_picture.memory_estimates import WorkerMemory
from rankless.plan_picture.pictured_job import PicturedJob
from rankless.plan_picture.worker_grid import format_workers
from rankless.records.quantities import format_decimal_bytes

KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")
NAME_WIDTH = 132
TOTAL_WIDTH = 72
ROW = 26
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
            y = draw_sizes(drawing, group, Area(x=area.x + NAME_WIDTH, y=y, width=area.width - NAME_WIDTH))
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
    room = area.width - NAME_WIDTH - TOTAL_WIDTH - GAP
    drawing.add(
        fit_label(Label(x=area.x, y=area.y + 17, text=names), NAME_WIDTH - GAP),
        fit_label(Label(x=area.x + area.width, y=area.y + 17, text=total, anchor="end"), TOTAL_WIDTH),
    )
    x = area.x + NAME_WIDTH
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
