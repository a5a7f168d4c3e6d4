"""Draw the modules of a job: their parameters, who holds them, and what moves for them."""

from collections.abc import Sequence

from rankless.plan_picture.drawing import GAP, Area, Bar, Drawing, Label, fit_label, scale
from rankless.plan_picture.holdings import Holding, describe_divisions
from rankless.plan_picture.pictured_job import PicturedJob, PicturedModule, PicturedMove
from rankless.records.quantities import format_decimal_bytes

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
