"""`rankless help`, and completion in shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankless.cli import main, summarize_commands

FOLDER = Path(sys.executable).parent
ASK_BASH = """
eval "$(rankless completion bash)"
COMP_LINE=$1; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; COMP_KEY=9
read -ra COMP_WORDS <<< "$COMP_LINE"
[[ $COMP_LINE == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete rankless
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(line: str, folder: Path, **environment: str) -> list[str]:
    """Return what bash offers after this line."""
    variables = {**os.environ, "PATH": f"{FOLDER}{os.pathsep}{os.environ['PATH']}", **environment}
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK_BASH, "bash", line],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.skipif(not (FOLDER / "rankless").exists(), reason="the command rankless is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rankless run --hang", ["--hang-timeout"]),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("rankless ", [*summarize_commands()]),
                ("rankless fleet", ["fleetrun"]),
                ("rankless run --show ", ["all", "first"]),
                ("rankless help ho", ["horovodrun"]),
                ("rankless completion ", ["bash", "fish", "zsh"]),
                ("rankless run -n 2 tra", ["train.py"]),
                ("rankless run -n 2 train.py da", ["data.csv"]),
                ("rankless torchrun --nproc-per", ["--nproc-per-node"]),
                ("rankless nothing --x", []),
            ]
        ),
    ],
)
def test_bash_completes_commands_options_and_files_without_torch(line: str, offered: list[str], tmp_path: Path):
    for name in ("train.py", "data.csv"):
        (tmp_path / name).touch()
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise RuntimeError('torch is imported')")
    found = complete(line, tmp_path, PYTHONPATH=str(tmp_path / "path"))
    assert [word for word in offered if word not in found] == [], found
    assert bool(found) == bool(offered), found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_code_that_registers_rankless(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert {"bash": "complete ", "zsh": "compdef ", "fish": "complete --command rankless"}[shell] in code
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=code, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_help_shows_all_commands_or_one(capsys: pytest.CaptureFixture[str]):
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in summarize_commands())
    assert main(["help", "run"]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--help"])
    assert (leaving.value.code, capsys.readouterr().out) == (0, shown)
    assert "--hang-timeout" in shown


def test_help_for_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(["help", "rnu"])
    assert leaving.value.code == 2
    assert "'rnu' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["rnu"]])
def test_a_command_line_without_a_command_prints_help_or_the_nearest_one(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    code = None
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert ("did you mean run?" if arguments else "rankless help COMMAND") in capsys.readouterr().err
