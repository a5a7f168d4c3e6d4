"""`rankless run train.py -n 2` starts one worker, and says where the option belongs."""

import subprocess
from pathlib import Path

import pytest
from support.jobs import DEADLINE_SECONDS, RANKLESS

from rankless.cli.shared_run_options import find_misplaced_count
from rankless.config.run_config import Program


@pytest.mark.parametrize(
    ("text", "arguments", "count"),
    [
        ("print()", ("-n", "2"), "2"),
        ("print()", ("data", "-n4", "--lr", "0.1"), "4"),
        ("print()", ("-n=2",), "2"),
        ("print()", (), None),
        ("print()", ("-n", "two"), None),
        ("print()", ("--n", "2"), None),
        ("print()", ("-nope", "2"), None),
        ("parser.add_argument('-n', type=int)", ("-n", "2"), None),
        ('parser.add_argument("--number", "-n")', ("-n", "2"), None),
    ],
)
def test_a_count_after_the_script_is_found_unless_the_script_has_the_option(text, arguments, count, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(text)
    hint = find_misplaced_count(Program(kind="script", target=str(script), arguments=arguments))
    assert (hint is None) == (count is None)
    assert hint is None or f"`rankless run -n {count} {script}`" in hint


def test_a_module_and_a_missing_script_give_no_hint(tmp_path: Path):
    for program in (
        Program(kind="module", target="train", arguments=("-n", "2")),
        Program(kind="script", target=str(tmp_path / "missing.py"), arguments=("-n", "2")),
    ):
        assert find_misplaced_count(program) is None


@pytest.mark.slow
def test_run_prints_the_hint_before_it_starts(tmp_path: Path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])")
    job = subprocess.run(
        [*RANKLESS, "run", "train.py", "-n", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert job.stdout == "['-n', '2']\n"
    assert job.stderr.startswith("rankless: train.py receives '-n 2', and one worker starts")
    assert "`rankless run -n 2 train.py`" in job.stderr
