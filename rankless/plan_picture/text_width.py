"""How wide a text is in a picture, without a font: from the widths of DejaVu Sans, wider than most sans-serif fonts."""

import re
import unicodedata

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
