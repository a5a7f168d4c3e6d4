"""Draw the schedule of a pipeline: what each worker computes in a step, if all stages take the same time."""

from rankless.plan_picture.drawing import GAP, Area, Bar, Drawing, Label, fit_label
from rankless.plan_picture.text_width import measure_text
from rankless.records.job_programs import PipelineRecord, PipelineUnit

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
