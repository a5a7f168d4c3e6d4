"""The README is short, and its example prints the same numbers everywhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh-CN.md"
GUIDE = ROOT / "docs/guides/loop-to-job.md"


def first_block(page: Path, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def without(diff: str, removed: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith(removed))


def losses(folder: Path, *command: str) -> list[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    return [line for line in found if re.fullmatch(r"epoch \d: loss \d\.\d{4}", line)]


def test_the_readme_has_at_most_700_words_and_two_pictures():
    text = README.read_text()
    assert len(text.split()) <= 700
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert len(pictures) == 2
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_diffs_of_the_readme_and_of_the_guide_are_of_the_script_of_the_readme():
    diff = first_block(GUIDE, "diff")
    assert without(diff, "+") == first_block(README, "python")
    assert first_block(README, "diff") in diff


def test_the_chinese_readme_has_the_same_example_commands_and_pictures():
    blocks = re.compile(r"^```(?:python|diff|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    assert blocks.findall(README.read_text()) == blocks.findall(CHINESE.read_text())
    commands = re.compile(r"^((?:rankless|python|make) .*?)  +#", re.MULTILINE)
    assert commands.findall(README.read_text()) == commands.findall(CHINESE.read_text())
    pictures = re.compile(r"!\[.+?\]\((.+?)\)")
    assert pictures.findall(README.read_text()) == pictures.findall(CHINESE.read_text())


def test_the_chinese_readme_has_the_same_tables():
    def rows(page: Path) -> list[list[str]]:
        table = [line for line in page.read_text().splitlines() if line.startswith("|")]
        return [re.findall(r"\d[\d.]*", re.sub(r"\]\(.*?\)", "", line)) for line in table]

    assert rows(README) == rows(CHINESE)


@pytest.mark.parametrize("page", ["from-oneflow", "from-fleetrun", "from-paddle-ps"])
def test_a_chinese_guide_has_the_code_and_the_options_of_the_english_one(page: str):
    english = (ROOT / f"docs/guides/{page}.md").read_text()
    chinese = (ROOT / f"docs/zh/{page}.md").read_text()
    blocks = re.compile(r"^```(\w+)\n(?:# \w+\.py\n)?(.*?)^```$", re.DOTALL | re.MULTILINE)
    assert blocks.findall(english) == blocks.findall(chinese)
    assert set(re.findall(r"`(--\w+)", english)) == set(re.findall(r"`(--\w+)", chinese))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [pytest.param(workers, marks=[] if workers == 2 else pytest.mark.exhaustive) for workers in (1, 2, 3, 4)]
)
def test_the_readme_examples_print_the_same_numbers_on_every_run_and_with_every_n(workers: int, tmp_path: Path):
    diff = first_block(GUIDE, "diff")
    (tmp_path / "train.py").write_text(without(diff, "+"))
    (tmp_path / "job.py").write_text(without(diff, "-"))
    plain = losses(tmp_path, sys.executable, "train.py")
    assert len(plain) == 3
    assert losses(tmp_path, sys.executable, "job.py") == plain
    for script in ("train.py", "job.py"):
        assert losses(tmp_path, "rankless", "run", "--no-progress", "-n", str(workers), script) == plain


def test_the_architecture_page_has_at_most_1200_words_and_names_files_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 1200
    paths = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / "rankless" / path).is_file()]
    packages = re.findall(
        r"`((?:cli|launch|runtime|verify|jobs|data|context|compiler|checkpoint|collectives|ownership)(?:\.\w+)+)`", text
    )
    assert len(packages) > 20
    assert not [name for name in packages if not module_exists(name)]


def module_exists(name: str) -> bool:
    """Whether `a.b.c` is a module, or a name in the module `a.b`."""
    path = ROOT / "rankless" / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
