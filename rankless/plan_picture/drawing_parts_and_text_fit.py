"""A picture as data: bars and labels at their places, which tests can check and `picture_file` writes."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TEXT_SIZE = 12
ASCENT, DESCENT = 0.95, 0.25
"""How far a text reaches above and below its baseline, in font sizes."""
GAP = 8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A rectangle.

    Attributes:
        style (str): The class of the style sheet, without the prefix.
        title (str): What a browser shows under the pointer.
        amount (int | None): The bytes for which its length stands, if it stands for any.
    """

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str = ""
    amount: int | None = None


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text in one line that begins at `x`, or ends there, or has its middle there. `y` is the baseline."""

    x: float
    y: float
    text: str
    size: float = TEXT_SIZE
    style: str = "text"
    anchor: str = "start"
    title: str = ""

    @property
    def is_bold(self) -> bool:
        """Whether its style is bold."""
        return self.style == "heading"

    @property
    def width(self) -> float:
        """The most that it takes in width."""
        return measure_text(self.text, self.size, bold=self.is_bold)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Its left, top, right and bottom."""
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * self.width
        return left, self.y - ASCENT * self.size, left + self.width, self.y + DESCENT * self.size


@dataclass(kw_only=True)
class Drawing:
    """A picture that grows downwards. Sections add their parts, and return where they end."""

    width: float
    height: float = 0
    bars: list[Bar] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def add(self, *parts: Bar | Label) -> None:
        """Add parts, of which the later ones lie on top."""
        self.bars += [part for part in parts if isinstance(part, Bar)]
        self.labels += [part for part in parts if isinstance(part, Label)]


@dataclass(frozen=True, kw_only=True)
class Area:
    """Where a section lies: its left edge, its top, and its width."""

    x: float
    y: float
    width: float


def fit_label(label: Label, width: float, *, title: str = "") -> Label:
    """Return a label that fits a width. One that is shortened has its whole text as its title.

    Args:
        label: The label with its whole text.
        width: The width.
        title: A title that it has in any case.
    """
    whole = clean_text(label.text)
    text = shorten_text(whole, width, label.size, bold=label.is_bold)
    titles = [whole if text != whole and whole not in title else "", clean_text(title)]
    return Label(
        x=label.x,
        y=label.y,
        text=text,
        size=label.size,
        style=label.style,
        anchor=label.anchor,
        title="; ".join(filter(None, titles)),
    )


def wrap_texts(texts: Sequence[str], width: float) -> Iterator[str]:
    """Yield texts that are joined in lines of at most this width; a text of its own may be wider."""
    line = ""
    for text in texts:
        joined = f"{line} · {text}" if line else text
        if line and measure_text(joined, TEXT_SIZE) > width:
            yield line
            joined = text
        line = joined
    if line:
        yield line


def scale(amount: int, most: int, length: float) -> float:
    """Return the length of a bar for an amount, of which the greatest has `length`."""
    return length * amount / most if most else 0.0


_WIDTHS = {
    0.28: "'ijl",
    0.32: "IJ ,.·",
    0.37: "/:;\\|f-",
    0.42: "()[]t!r",
    0.50: '*_`sz?"c',
    0.58: "LFk",
    0.64: "vxyPTYaeo$0123456789ESbdghnpqu{}",
    0.70: "KABVXZCR",
    0.79: "UNH&DGOQ",
    0.84: "w#+<=>^~→↓≥",
    0.87: "M",
    1.00: "%mW@…",
}
_WIDTH_OF = {character: width for width, characters in _WIDTHS.items() for character in characters}
_OTHER_WIDTH = 1.05
"""Of all other characters, which may come from any font."""
_BOLD = 1.13
ELLIPSIS = "…"
_UNREADABLE = re.compile(r"[^\S ]|[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean_text(text: str) -> str:
    """Return a text without what XML refuses, and without what moves other characters, such as a line break."""
    return "".join("\ufffd" if is_invisible(character) else character for character in _UNREADABLE.sub("\ufffd", text))


def is_invisible(character: str) -> bool:
    """Return whether a character only changes how others look, such as one that turns the direction of writing."""
    return unicodedata.category(character) in ("Cf", "Zl", "Zp")


def measure_text(text: str, size: float, *, bold: bool = False) -> float:
    """Return the most that a text takes in width, in the units of its font size."""
    return size * sum(map(_find_width, text)) * (_BOLD if bold else 1)


def _find_width(character: str) -> float:
    """Return the width of a character: of a letter with an accent that of the letter."""
    if unicodedata.category(character) == "Mn":
        return 0.0
    return _WIDTH_OF.get(unicodedata.normalize("NFD", character)[0], _OTHER_WIDTH)


def is_measured(text: str) -> bool:
    """Return whether the widths of all characters of a text are known."""
    return all(character in _WIDTH_OF for character in text)


def shorten_text(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Return a text that fits a width, shortened in the middle if it must be."""
    if measure_text(text, size, bold=bold) <= width:
        return text
    low, high = 0, len(text) - 1
    while low < high:
        kept = (low + high + 1) // 2
        if measure_text(_keep(text, kept), size, bold=bold) <= width:
            low = kept
        else:
            high = kept - 1
    return _keep(text, low)


def _keep(text: str, count: int) -> str:
    """Return the first and the last characters of a text, `count` in all."""
    last = count // 2
    return text[: count - last] + ELLIPSIS + text[len(text) - last :]
