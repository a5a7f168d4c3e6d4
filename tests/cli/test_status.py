"""The command line of `rankless status`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import RANKLESS, job_environment, rankless

from rankless.cli import main


@pytest.mark.parametrize("seconds", ["0", "-1", "0.01", "nan", "inf", "-inf", "1e999"])
def test_an_interval_that_cannot_be_is_refused(seconds: str, tmp_path: Path):
    done = rankless("status", f"--watch={seconds}", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected: --watch with a number of seconds from 0.1 on" in done.stderr


def test_an_interval_that_is_no_number_is_the_run_if_there_is_no_other(tmp_path: Path):
    done = rankless("status", "--watch", "log/latest", folder=tmp_path)
    assert "found:    'log/latest', which is none of these" in done.stderr
    both = rankless("status", "--watch", "soon", "log/latest", folder=tmp_path)
    assert (both.returncode, both.stdout) == (2, "")
    assert "found:    'soon'" in both.stderr


@pytest.mark.parametrize("options", [("--jsn",), ("one", "two"), ("--json=result.json",), ("--watch", "1", "a", "b")])
def test_unknown_options_and_a_second_run_are_refused(options: tuple[str, ...], tmp_path: Path):
    done = rankless("status", *options, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: rankless status" in done.stderr


def test_a_reader_that_has_gone_ends_the_command_quietly(tmp_path: Path):
    with subprocess.Popen(
        [*RANKLESS, "status", "--watch", "0.1"],
        cwd=tmp_path,
        env=job_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_the_command_imports_neither_torch_nor_numpy_nor_rich(tmp_path: Path):
    code = "import sys, rankless.cli.status\nsys.exit(str({'torch', 'numpy', 'rich', 'zmq'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ), capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (1, b"")


def test_without_runs_of_this_user_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(os, "geteuid", lambda: 65533)  # other tests have runs
    assert main(["status", "--json"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["status"]) == 0
    text, messages = capsys.readouterr()
    assert (text.startswith("this user has no run in progress on this host"), messages) == (True, "")
