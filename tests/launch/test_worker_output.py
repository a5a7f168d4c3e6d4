"""What the terminal makes of the bytes that workers write."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rankless.launch import worker_output
from rankless.launch.agent import SharedFiles
from rankless.launch.worker_output import LineWriter, PrefixedLines, WholeLines, Write
from rankless.records.events import FileOpened


def test_a_prefix_precedes_each_line_whatever_its_end_and_wherever_it_is_cut():
    for text in (b"one\r\ntwo\rthree\n", b"one\ntwo\nthree"):
        for cut in range(len(text)):
            shown: list[bytes] = []
            lines = PrefixedLines("[1] ", shown.append)
            lines.write(text[:cut])
            lines.idle()
            lines.write(text[cut:])
            lines.close()
            assert b"".join(shown) == b"[1] one\n[1] two\n[1] three\n"


def test_lines_wait_for_their_end_and_unfinished_ones_for_half_a_second():
    shown: list[bytes] = []
    now = 7.0
    lines = WholeLines(shown.append, clock=lambda: now)
    lines.write(b"one\ntw")
    assert shown == [b"one\n"]
    now += 0.4
    lines.idle()
    lines.write(b"o\n50%\r")
    lines.write(b"na")
    now += 0.4
    lines.idle()
    lines.write(b"me: ")
    now += 0.4
    lines.idle()
    assert shown == [b"one\n", b"two\n50%\r"]
    now += 0.2
    lines.idle()
    lines.idle()
    lines.close()
    assert shown == [b"one\n", b"two\n50%\r", b"name: "]


def test_the_end_of_a_file_shows_an_unfinished_line_at_once():
    shown: list[bytes] = []
    lines = WholeLines(shown.append)
    lines.write(b"half")
    lines.close()
    assert shown == [b"half"]


def test_the_warning_for_a_file_of_two_ranks_suits_programs_without_rankless():
    files = SharedFiles(foreign=True)
    first, second = (FileOpened(rank=rank, time_ns=0, path="/data/x", line="main.py:3") for rank in range(2))
    assert files.check(first) is None
    text = files.check(second)
    assert text is not None
    assert "ranks 0 and 1 both write" in text
    assert "RANK is 0" in text
    assert "rankless" not in text


class CountedWork:
    """Counts the bytes that a line writer copies or searches: those of blocks, and of what it makes from them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        work, line_ends = self, re.compile(worker_output._LINE_ENDS.pattern)

        class LineEnds:
            def split(self, text: bytes) -> list[bytes]:
                work.count += len(text)
                return [block(part) for part in line_ends.split(text)]

        class Block(bytes):
            def __add__(self, other: Any) -> bytes:
                return work.counted(bytes.__add__(self, other))

            def __radd__(self, other: Any) -> bytes:
                return work.counted(other + bytes(self))

            def __getitem__(self, key: Any) -> Any:
                return work.counted(bytes.__getitem__(self, key))

            def rfind(self, *arguments: Any) -> int:
                work.count += len(self)
                return bytes.rfind(self, *arguments)

        block = Block
        self._block = block
        monkeypatch.setattr(worker_output, "_LINE_ENDS", LineEnds())

    def counted(self, result: Any) -> Any:
        self.count += len(result) if isinstance(result, bytes) else 0
        return self._block(result) if isinstance(result, bytes) else result

    def write(self, lines: LineWriter, text: bytes) -> None:
        for start in range(0, len(text), 1 << 16):
            lines.write(self._block(text[start : start + (1 << 16)]))
        lines.close()


@pytest.mark.parametrize("make", [lambda write: PrefixedLines("[1] ", write), WholeLines])
@pytest.mark.parametrize("unit", [b"w", b"50% " * 250 + b"\r", b"word " * 13_000 + b"\n"])
def test_the_work_for_output_is_proportional_to_its_length_whatever_its_lines(
    make: Callable[[Write], LineWriter], unit: bytes, monkeypatch: pytest.MonkeyPatch
):
    work, shown = CountedWork(monkeypatch), list[bytes]()
    text = (unit * (20_000_000 // len(unit) + 1))[:20_000_000]
    work.write(make(shown.append), text)
    assert sum(map(len, shown)) >= len(text)
    assert work.count <= 6 * len(text)
