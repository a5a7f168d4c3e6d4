"""The scoreboard shows the counts of the operator tests, and what is wrong."""

import json
from pathlib import Path

import pytest
from support import scoreboard_page

ROW = {
    "variant": "add",
    "counts": [
        ["float64", "contiguous", "backward", "split", "", 5],
        ["float32", "transposed", "backward", "gathered", "input of add", 2],
        ["bool", "contiguous", "forward", "refused", "no such thing", 1],
    ],
    "equal_bits": 6,
    "divisible": 4,
    "not_split": {"input of add": 1},
    "failures": [],
}


def test_the_page_counts_kinds_and_what_can_be_split():
    text = scoreboard_page.page([ROW], "abc1234")
    assert "at commit abc1234: 1 variants of operators, 8 cases." in text
    assert "Of 4 cases that can be split, decided by brute force, 3 are (75.0 %)." in text
    assert "| backward | 5 | 2 | 0 | 0 | 0 |" in text
    assert "| all | 5 | 2 | 1 | 0 | 0 |" in text
    assert "- `no such thing`: `add` (1 cases)" in text
    assert "- `add`: input of add (1)" in text
    assert text.endswith("## Wrong or crashed\n\nNone.\n")


def test_the_last_row_of_a_variant_counts_and_failures_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scoreboard_page, "PAGE", tmp_path / "scoreboard.md")
    later = ROW | {"failures": ["wrong: add, float64"]}
    (tmp_path / "rows").write_text(json.dumps(ROW) + "\n" + json.dumps(later) + "\n")
    scoreboard_page.write_page(tmp_path / "rows", "abc1234")
    text = (tmp_path / "scoreboard.md").read_text()
    assert "1 variants of operators, 8 cases" in text
    assert text.endswith("- `wrong: add, float64`\n")
