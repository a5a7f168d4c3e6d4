"""The messages that the pages on the logical view show are those of the scripts above them."""

import re
from pathlib import Path

import pytest
from support.warm_runs import rankless

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("tutorial", "explanation/logical-view", "guides/loop-to-job")
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FAILS = {"differs.py"}
IN_CI = {"whole.py"}


def list_shown() -> list[tuple[str, str, str]]:
    """Return the name and the text of each script that a text block follows, and that text."""
    found, name, script = [], "", ""
    for page in PAGES:
        for kind, body in BLOCK.findall((DOCS / f"{page}.md").read_text()):
            if kind == "text":
                found.append((name, script, body))
            elif body.startswith("# "):
                name, script = body.partition("\n")[0].removeprefix("# "), body
    return found


def normalize(text: str) -> str:
    """Return a text without line ends, and without numbers that differ between runs."""
    return re.sub(r"\d{6,}", "NUMBER", " ".join(text.split()))


SHOWN = [
    pytest.param(*each, id=each[0], marks=[] if each[0] in IN_CI else [pytest.mark.exhaustive]) for each in list_shown()
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "script", "shown"), SHOWN)
def test_a_script_of_the_pages_says_what_they_show(name: str, script: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(script)
    is_plan = shown.startswith("ordinary loop")
    command = ["plan", "-n", "2"] if is_plan else ["run", "-n", "2", "--no-progress"]
    done = rankless(*command, name, folder=tmp_path)
    assert (done.returncode != 0) == (name in FAILS), done.stdout + done.stderr
    assert normalize(shown) in normalize(done.stdout + done.stderr)


def test_each_page_shows_a_message() -> None:
    assert {name for name, *_ in list_shown()} == {"ordinary.py", "whole.py", "differs.py", "packed.py", "divides.py"}
