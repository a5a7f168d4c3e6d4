"""Write the file of a picture: as SVG, or as an HTML page with tables of the same numbers below each job.

Both stand alone: no scripts, no fonts, no links.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from rankless.errors import ConfigError
from rankless.plan_picture.drawing_parts_and_text_fit import Bar, Drawing, Label, clean_text, is_measured
from rankless.plan_picture.holdings import describe_divisions, format_workers
from rankless.plan_picture.picture_data import PicturedJob, PicturedPlan
from rankless.plan_picture.picture_layout import KINDS, draw_one_job, draw_plan, summarize
from rankless.records.number_formatting import format_decimal_bytes

STYLE = """
:root { color-scheme: light dark; }
body { margin: 24px; font-family: 'DejaVu Sans', 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; font-size: 14px;
  background: #ffffff; color: #1f2328; }
main { max-width: 1320px; margin: auto; }
svg { display: block; max-width: 100%; height: auto; }
.tables { margin: 0 24px; }
.scrolled { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0 24px; }
caption { text-align: left; font-weight: 600; font-size: 16px; padding: 8px 0; white-space: nowrap; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid #d1d9e0; vertical-align: top;
  overflow-wrap: anywhere; min-width: 72px; max-width: 640px; }
td:nth-child(2) { min-width: 96px; }
th[scope=row] { min-width: 110px; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3; }
  th, td { border-color: #3d444d; }
}
"""

Table = tuple[str, tuple[tuple[str, ...], ...]]
"""A table's caption and rows."""


def format_page(plan: PicturedPlan) -> str:
    """Return the page of a plan."""
    title = f"Parallel plan of {plan.script}"
    root = ElementTree.Element("html", {"lang": "en"})
    head = ElementTree.SubElement(root, "head")
    ElementTree.SubElement(head, "meta", {"charset": "utf-8"})
    ElementTree.SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    add_text(head, "title", title)
    ElementTree.SubElement(head, "style").text = STYLE
    main = ElementTree.SubElement(ElementTree.SubElement(root, "body"), "main")
    add_text(main, "h1", title)
    shown: dict[Table, str] = {}
    for number, job in enumerate(plan.jobs):
        add_job(main, job, number, shown)
    for text in plan.others:
        add_text(main, "p", text)
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def add_job(main: ElementTree.Element, job: PicturedJob, number: int, shown: dict[Table, str]) -> None:
    """Add the section of a job. `shown` has the tables of the page, and receives new ones; none is shown twice."""
    section = ElementTree.SubElement(main, "section", {"aria-label": clean_text(job.title)})
    picture = make_svg(
        draw_one_job(job), title=job.title, description=f"{summarize(job)}. Tables have the numbers.", number=number
    )
    section.append(picture)
    tables = ElementTree.SubElement(section, "div", {"class": "tables"})
    for caption, titles, rows in list_tables(job):
        table = caption, tuple(map(tuple, rows))
        if table in shown:
            add_text(tables, "p", f"{caption}: the same as for {shown[table]}")
        else:
            shown[table] = job.title
            add_table(tables, caption, titles, rows)


def list_tables(job: PicturedJob) -> Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Yield the tables of a job: caption, titles and rows; those with rows only."""
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("workers", ["worker", *(axis.name for axis in job.grid.axes)], list_workers(job)),
        ("memory per worker", ["workers", *KINDS, "from"], list_memory(job)),
        ("modules", ["module", "parameters", "held by"], list_modules(job)),
        (
            "what moves per call",
            ["module", "movement", "along", "pass", "values", "sent per worker", "line", "why"],
            list_moves(job),
        ),
        ("schedule", ["worker", "stages", "order of work"], list_schedule(job)),
        (
            "parameters and buffers",
            ["name", "shape", "type", "bytes", "value", "gradient", "optimizer state"],
            list_tensors(job),
        ),
    ]
    yield from (table for table in tables if table[2])


def list_workers(job: PicturedJob) -> list[list[str]]:
    """Return the ranks of each worker."""
    ranks = [job.grid.find_ranks(worker).values() for worker in range(job.grid.count)]
    return [[str(worker), *map(str, found)] for worker, found in enumerate(ranks)]


def list_memory(job: PicturedJob) -> list[list[str]]:
    """Return the memory of the workers."""
    return [
        [
            format_workers(group.workers),
            *(format_decimal_bytes(group.sizes[kind]) if kind in group.sizes else "-" for kind in KINDS),
            "measured on worker 0" if group.is_measured else "estimated from the plan",
        ]
        for group in job.memory
    ]


def list_modules(job: PicturedJob) -> list[list[str]]:
    """Return the modules and who holds their parameters."""
    return [
        [
            module.name,
            format_decimal_bytes(module.parameter_bytes) if module.tensors else "-",
            "; ".join(f"{', '.join(holding.kinds)}: {holding.text}" for holding in module.holdings) or "-",
        ]
        for module in job.modules
    ]


def list_moves(job: PicturedJob) -> list[list[str]]:
    """Return what moves for each module."""
    return [
        [
            module.name,
            move.name,
            move.axis or "-",
            move.direction,
            format_decimal_bytes(move.value_bytes),
            format_decimal_bytes(move.sent_bytes),
            move.line,
            "; ".join(move.reasons),
        ]
        for module in job.modules
        for move in module.moves
    ]


def list_schedule(job: PicturedJob) -> list[list[str]]:
    """Return what each worker of a pipeline computes, in order."""
    if job.pipeline is None:
        return []
    return [
        [
            str(worker),
            ", ".join(str(number) for number, stage in enumerate(job.pipeline.stages) if worker in stage.workers),
            ", ".join(f"{unit.kind} {unit.microbatch} of stage {unit.stage}" for unit in units),
        ]
        for worker, units in enumerate(job.pipeline.timeline)
    ]


def list_tensors(job: PicturedJob) -> list[list[str]]:
    """Return how each parameter is held, and what this program does not use."""
    used = [(tensor, "") for module in job.modules for tensor in module.tensors]
    return [
        [
            f"{tensor.name}{remark}",
            str(list(tensor.shape)),
            tensor.dtype,
            format_decimal_bytes(tensor.bytes),
            describe_divisions(tensor.list_divisions("parameters")),
            describe_divisions(tensor.list_divisions("gradients")) if job.program.trains else "-",
            describe_divisions(tensor.list_divisions("optimizer state")) if job.program.trains else "-",
        ]
        for tensor, remark in [*used, *((tensor, " (not used by this program)") for tensor in job.unused)]
    ]


def add_table(parent: ElementTree.Element, caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Add a table whose first column names the rows."""
    frame = ElementTree.SubElement(parent, "div", {"class": "scrolled", "tabindex": "0"})
    table = ElementTree.SubElement(frame, "table")
    add_text(table, "caption", caption)
    line = ElementTree.SubElement(ElementTree.SubElement(table, "thead"), "tr")
    for title in titles:
        add_text(line, "th", title, scope="col")
    body = ElementTree.SubElement(table, "tbody")
    for name, *cells in rows:
        line = ElementTree.SubElement(body, "tr")
        add_text(line, "th", name, scope="row")
        for cell in cells:
            add_text(line, "td", cell)


def add_text(parent: ElementTree.Element, tag: str, text: str, **attributes: str) -> None:
    """Add an element with a text."""
    ElementTree.SubElement(parent, tag, attributes).text = clean_text(text)


PictureFormat = Literal["svg", "html"]


def find_format(path: str) -> PictureFormat | None:
    """Return the format of a file by its extension; None for another one."""
    endings: dict[str, PictureFormat] = {".svg": "svg", ".html": "html"}
    return endings.get(Path(path).suffix.lower())


def format_picture(plan: PicturedPlan, form: PictureFormat) -> str:
    """Return the text of a picture's file."""
    if form == "html":
        return format_page(plan)
    texts = [f"{job.title}: {summarize(job)}" for job in plan.jobs]
    return format_svg(
        draw_plan(plan), title=f"Parallel plan of {plan.script}", description=". ".join([*texts, *plan.others])
    )


def write_picture(path: str, plan: PicturedPlan) -> None:
    """Write a picture to a file, whose extension says the format. Raises `ConfigError` if that fails."""
    form = find_format(path)
    assert form is not None, f"{path} was not checked"
    try:
        Path(path).write_text(format_picture(plan, form), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            expected=f"to write the picture to {path}",
            found=error.strerror,
            fix="name a file that you may write",
        ) from error


PREFIX = "plan-"
"""Of all classes, so that a page may embed pictures."""
FONTS = "'DejaVu Sans', 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
LIGHT = {
    "paper": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "rule": "#d1d9e0",
    "empty": "#e4e9ee",
    "worker": "#ddf0ff",
    "held": "#0969da",
    "parameters": "#0969da",
    "gradients": "#d4700a",
    "optimizer-state": "#8250df",
    "activations": "#1a7f37",
    "buffers": "#6e7781",
    "waiting": "#eef1f4",
    "unit-forward": "#b9dcff",
    "unit-backward": "#ffd6a8",
    "unit-weights": "#dccbff",
    "later": "#1f2328",
    "axis-none": "#6e7781",
}
DARK = {
    "paper": "#0d1117",
    "text": "#e6edf3",
    "muted": "#9aa4af",
    "rule": "#3d444d",
    "empty": "#2a313a",
    "worker": "#10304d",
    "held": "#4493f8",
    "parameters": "#4493f8",
    "gradients": "#f0883e",
    "optimizer-state": "#ab7df8",
    "activations": "#3fb950",
    "buffers": "#9198a1",
    "waiting": "#1b222b",
    "unit-forward": "#14457a",
    "unit-backward": "#71400c",
    "unit-weights": "#4b3585",
    "later": "#e6edf3",
    "axis-none": "#9198a1",
}
AXES = ("#0a7ea4", "#c2410c", "#15803d", "#b0338f", "#8a6d00", "#5b5bd6")
"""Colours of the axes of a mesh, which are seen on both backgrounds."""


def format_svg(drawing: Drawing, *, title: str, description: str) -> str:
    """Return a picture as the text of an SVG file."""
    root = make_svg(drawing, title=title, description=description, number=0)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True) + "\n"


def make_svg(drawing: Drawing, *, title: str, description: str, number: int) -> ElementTree.Element:
    """Return a picture as an element; `number` differs between the pictures of a page."""
    width, height = format_number(drawing.width), format_number(drawing.height)
    names = (f"{PREFIX}title-{number}", f"{PREFIX}description-{number}")
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": width,
            "height": height,
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-labelledby": " ".join(names),
            "class": f"{PREFIX}picture",
        },
    )
    for name, tag, text in zip(names, ("title", "desc"), (title, description), strict=True):
        ElementTree.SubElement(root, tag, {"id": name}).text = clean_text(text)
    ElementTree.SubElement(root, "style").text = make_style()
    ElementTree.SubElement(root, "rect", {"class": f"{PREFIX}paper", "width": width, "height": height})
    root.extend(make_bar(bar) for bar in drawing.bars)
    root.extend(make_label(label) for label in drawing.labels)
    return root


def make_bar(bar: Bar) -> ElementTree.Element:
    """Return a bar as an element."""
    places = {"x": bar.x, "y": bar.y, "width": bar.width, "height": bar.height}
    classes = " ".join(f"{PREFIX}{style}" for style in bar.style.split())
    element = ElementTree.Element(
        "rect", {"class": classes, **{name: format_number(value) for name, value in places.items()}}
    )
    add_title(element, bar.title)
    return element


def make_label(label: Label) -> ElementTree.Element:
    """Return a label as an element. Characters that may come from any font get a fixed width."""
    fixed = {}
    if not is_measured(label.text):
        fixed = {"textLength": format_number(label.width * 0.98), "lengthAdjust": "spacingAndGlyphs"}
    element = ElementTree.Element(
        "text",
        {
            "class": f"{PREFIX}{label.style}",
            "x": format_number(label.x),
            "y": format_number(label.y),
            "font-size": format_number(label.size),
            "text-anchor": label.anchor,
            **fixed,
        },
    )
    element.text = label.text
    add_title(element, label.title)
    return element


def add_title(element: ElementTree.Element, title: str) -> None:
    """Add what a browser shows under the pointer."""
    if title:
        ElementTree.SubElement(element, "title").text = clean_text(title)


def make_style() -> str:
    """Return the style sheet of a picture, for light and dark."""
    return "\n".join(
        [
            f".{PREFIX}picture {{ font-family: {FONTS}; }}",
            *(make_rules(LIGHT)),
            *(f".{PREFIX}axis-{number} {{ fill: {colour}; }}" for number, colour in enumerate(AXES)),
            f".{PREFIX}heading {{ font-weight: 600; }}",
            f".{PREFIX}estimated {{ opacity: 0.55; }}",
            "@media (prefers-color-scheme: dark) {",
            *(make_rules(DARK)),
            "}",
        ]
    )


def make_rules(colours: dict[str, str]) -> Iterator[str]:
    """Yield a rule for each class."""
    for name, colour in colours.items():
        names = [f".{PREFIX}{name}", *([f".{PREFIX}heading"] if name == "text" else [])]
        yield f"{', '.join(names)} {{ fill: {colour}; }}"


def format_number(value: float) -> str:
    """Return a number with at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
