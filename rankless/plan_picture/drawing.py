"""A picture as data: bars and labels at their places, which tests can check and `svg` writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rankless.plan_picture.text_width import clean_text, measure_text, shorten_text

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


def wrap_texts(texts: Sequence[str], width: float, *, separator: str = " · ") -> Iterator[str]:
    """Yield texts that are joined in lines of at most this width; a text of its own may be wider."""
    line = ""
    for text in texts:
        joined = f"{line}{separator}{text}" if line else text
        if line and measure_text(joined, TEXT_SIZE) > width:
            yield line
            joined = text
        line = joined
    if line:
        yield line


def scale(amount: int, most: int, length: float) -> float:
    """Return the length of a bar for an amount, of which the greatest has `length`."""
    return length * amount / most if most else 0.0
