"""Every command of the README and the docs runs, with the scripts of their pages, or in a test that is named here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```([\w{}-]*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Commands that a test must not run, and where each is run instead.
RUN_ELSEWHERE = {
    "make demo": ".ci/run runs it, alone: four workers beside other tests take four times as long",
    "make test": "is what runs this test",
    "make check": "runs this test",
    "make docs": ".ci/run runs it, as a part of `make check`",
    "make gpu": "without a GPU it would only skip tests/gpu, which every run of the tests does",
    "make soak": "runs for an hour or more; tests/support/test_soak.py has its parts",
    "make bench": "measures for minutes; every benchmark's script is run in tests/bench",
    "rankless checkpoint export digits --to digits.safetensors": "tests/checkpoint/test_documented_blocks.py",
    "make bench BENCH=help JSON=rows.json": "needs the set-up of make; tests/bench runs the same benchmark",
}


# `make soak` runs all commands; tests of the command line run the other kinds in CI.
IN_CI = {"python train.py"}


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [shlex.join(command) for command in words if command]


ALL_COMMANDS = [command for page in PAGES for command in commands(page)]
HERE = [command for command in dict.fromkeys(ALL_COMMANDS) if command not in RUN_ELSEWHERE]
CASES = [
    pytest.param(command, id=command, marks=[] if command in IN_CI else [pytest.mark.exhaustive]) for command in HERE
]


def changed_script(diff: str) -> str:
    """The script after a diff: its lines without those that the diff removes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


# A block that begins with a file's name is a script that commands of the pages may run. The guide's diff stands for its
# result, and both READMEs have the same script.
TEXTS = [body for page in PAGES for body in blocks(page, "python")]
TEXTS += [changed_script(body) for body in blocks(ROOT / "docs/guides/loop-to-job.md", "diff")]
NAMED = [(found[1], body) for body in TEXTS if (found := re.match(r"# (\w+\.py)\n", body))]
SCRIPTS = list(dict.fromkeys(NAMED))
DIRECTIVES = {"{toctree}", "{include}", "{eval-rst}", "{command-reference}", "{error-catalogue}"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        shlex.split(command), cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the pages' scripts and the examples."""
    folder = tmp_path_factory.mktemp("reader")
    for name, script in SCRIPTS:
        (folder / name).write_text(script)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_a_command_of_the_docs_works(command: str, folder: Path):
    done = run(command, folder)
    good = (0, 1) if command.startswith("diff ") else (0,)
    assert done.returncode in good, done.stdout + done.stderr
    assert done.stdout
    if "verify" in command:
        assert re.search(r"^same training: ", done.stdout, re.MULTILINE), done.stdout


def test_ci_runs_the_demo_which_trains_and_verifies():
    assert "make demo" in (ROOT / ".ci" / "run").read_text()
    recipe = run("make --no-print-directory -n demo", ROOT).stdout.replace(".venv/bin/", "")
    trained, verified = (line for line in recipe.splitlines() if line.startswith("rankless"))
    assert trained == "rankless run -n 4 examples/lenet.py --at-least 0.97"
    assert verified.startswith("rankless verify -n 4 examples/lenet.py")


def test_the_pages_have_only_known_kinds_of_blocks():
    assert len(HERE) >= 5
    for page in PAGES:
        kinds = {kind for kind, _ in BLOCK.findall(page.read_text())}
        known = {"sh", "python", "text", "diff", "{literalinclude}"} | DIRECTIVES
        assert kinds <= known, f"{page.name}: a block of kind {kinds} would run in no test"


def test_the_scripts_of_the_pages_have_distinct_names():
    names = [name for name, _ in SCRIPTS]
    assert "train.py" in names
    assert len(set(names)) == len(names)


def test_every_listed_exception_is_a_documented_command():
    assert set(RUN_ELSEWHERE) | IN_CI <= set(ALL_COMMANDS)


def test_every_link_between_pages_exists():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
