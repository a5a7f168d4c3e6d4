"""The pictures of the documentation: the committed ones show what they must, and the script can make them again."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
EXPECTED = {
    "terminal.svg": ("rankless run -n 2", "rankless verify -n 2", "same training: "),
    "program_table.svg": ("rankless plan -n 2", "train job train (job.py:", "data moved per call", "all_reduce"),
}


def read_text(picture: Path) -> str:
    """Return the text that a picture shows, without markup and line breaks."""
    texts = re.findall(r"<text [^>]*>(.*?)</text>", picture.read_text())
    return html.unescape("".join(texts)).replace("\N{NO-BREAK SPACE}", " ")


def check_pictures(folder: Path) -> None:
    for name, expected in EXPECTED.items():
        shown = read_text(folder / name)
        assert [text for text in expected if text not in shown] == [], f"{name} shows: {shown}"
        assert "NOT the same training" not in shown
        source = (folder / name).read_text()
        assert "@font-face" not in source
        assert "url(http" not in source
        assert 'url("http' not in source


def test_the_committed_pictures_show_the_verdict_and_the_job_table():
    check_pictures(PICTURES)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_script_makes_the_pictures_again(tmp_path: Path):
    command = [sys.executable, PICTURES / "make_pictures.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_pictures(tmp_path)
