"""The command line itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankless.cli import main, summarize_commands
from rankless.version import VERSION


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"rankless {VERSION}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown and summary.split()[0] in shown for name, summary in summarize_commands().items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--device", "cpu", "x.py"], "unknown option --device; did you mean --devices?"),
        (["run", "--nowarm", "x.py"], "unknown option --nowarm; did you mean --no-warm?"),
        (["rnu"], "unknown command rnu; did you mean run?"),
        (["train.py", "--epochs", "2"], "expected a command before train.py: rankless run train.py --epochs 2"),
        (["-n", "2", "train.py"], "expected a command before -n: rankless run -n 2 train.py"),
        (["rnu", "train.py"], "unknown command rnu; did you mean run?"),
        (["--versoin"], "unknown option --versoin; did you mean --version?"),
        (["run", "--qqqqq"], "unknown option --qqqqq"),
        (["run", "-m"], "expected the module to run"),
    ],
)
def test_a_typing_error_gets_the_closest_known_option(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert words in capsys.readouterr().err


def test_help_imports_neither_torch_nor_numpy_nor_rich_nor_msgspec(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rankless.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'msgspec', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_rankless_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, rankless\nprint('torch' in sys.modules, rankless.__version__, sorted(rankless.__all__))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"False {VERSION} ")


def test_on_windows_the_import_fails_with_one_sentence(tmp_path: Path) -> None:
    code = "import sys\nsys.platform = 'win32'\nimport rankless"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not on Windows" in done.stderr.splitlines()[-1]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--version", 0),  # argparse itself ignores a broken pipe here
        ("run --help", 0),
        pytest.param("verify -n 2 train.py", 141, marks=pytest.mark.slow),
        pytest.param("plan -n 2 train.py", 141, marks=pytest.mark.slow),
        pytest.param("run -n 1 train.py", 0, marks=pytest.mark.slow),  # training continues without its terminal
    ],
)
def test_a_command_without_a_reader_ends_quietly(line: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, rankless\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "@rankless.job(model=model, optimizer=optimizer)\n"
        "def train(x):\n"
        "    return model(x).square().mean()\n"
        "for x in torch.ones(2, 4, 2): print(train(x).item(), flush=True)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rankless", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == code, done.stderr
