"""Write a drawing as an SVG that stands alone: no scripts, no fonts, no links."""

from collections.abc import Iterator
from xml.etree import ElementTree

from rankless.plan_picture.drawing import Bar, Drawing, Label, clean_text, is_measured

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
