"""docs/scoreboard.md has the counts of today's rules, and counts nothing wrong."""

import re

from support.scoreboard_page import PAGE, ROOT, RULES, digest_rules

LEAST_PERCENT_SPLIT = 95.0
VARIANTS = 702
"""Of the installed PyTorch's database; an operator whose test failed is not on the page."""


def test_the_scoreboard_is_of_todays_rules_or_says_what_has_run_with_them():
    text = PAGE.read_text()
    assert re.search(r"^Digest of the files that decide it: \w+\.$", text, re.MULTILINE)
    digests = re.findall(r"digest (?:of the files that decide it: )?(\w{16})\b", text, re.IGNORECASE)
    assert digest_rules() in digests, "the rules have changed since; `make soak` counts again"


def test_every_path_of_the_rules_exists():
    assert all((ROOT / "rankless" / "compiler" / name).exists() for name in RULES)


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
