"""docs/scoreboard.md has the counts of today's rules, and counts nothing wrong."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scoreboard.md"
RULES = [f"rankless/compiler/{name}" for name in ("rules", "ir", "sharding", "lowering", "capture/decompositions.py")]
"""Files that decide how an operator is split."""
LEAST_PERCENT_SPLIT = 95.0
VARIANTS = 702
"""Of the installed PyTorch's database; an operator whose test failed is not on the page."""


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_scoreboard_is_not_older_than_the_rules():
    tested = re.search(r"at commit (\w+)", PAGE.read_text())
    assert tested
    if git("cat-file", "-e", f"{tested[1]}^{{commit}}").returncode:
        pytest.skip(f"this tree does not have the history since {tested[1]}")
    changed = git("diff", "--name-only", tested[1], "--", *RULES)
    assert (changed.returncode, changed.stdout) == (0, ""), "`make soak` counts again"


def test_every_path_of_the_rules_exists():
    assert all((ROOT / path).exists() for path in RULES)


def test_the_scoreboard_counts_nothing_wrong_and_enough_split():
    text = PAGE.read_text()
    totals = re.findall(r"^\| all \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(totals) == 3
    assert all((wrong, crashed) == ("0", "0") for *_, wrong, crashed in totals)
    assert text.endswith("## Wrong or crashed\n\nNone.\n")
    assert re.search(rf": {VARIANTS} variants of operators, ", text)
    percent = re.search(r"are \(([\d.]+) %\)", text)
    assert percent
    assert float(percent[1]) >= LEAST_PERCENT_SPLIT
