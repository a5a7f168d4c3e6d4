"""When a worker fails: the job ends at once, names the root cause, and takes its exit code."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.warm_runs import run_script

from rankless.records.run_json_format import decode_run_summary

pytestmark = pytest.mark.slow

GROUP = """
import os, sys, time, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(4)
dist.all_reduce(x)
def train():
    while True:
        dist.all_reduce(torch.ones(4))
"""

ROOT_CAUSES = {
    "raises": ("raise ValueError('rank 1 is tired')", 1, "raised ValueError: rank 1 is tired"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (SIGKILL)"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by signal 11 (SIGSEGV)"),
    "exits with a code": ("sys.exit(7)", 7, "left with exit code 7"),
    "exits without a word": ("os._exit(9)", 9, "ended with exit code 9"),
    "ends early": ("sys.exit(0)", 1, "ended its script while other ranks still needed it"),
    "exits early without a word": ("os._exit(0)", 1, "ended its script while other ranks still needed it"),
    "leaves its group early": (
        "dist.destroy_process_group(); time.sleep(600)",
        1,
        "destroyed its process group while other ranks still needed it",
    ),
    "destroys its group and then cleans up for long": (
        "try:\n        raise ValueError('rank 1 is tired')\n"
        "    finally:\n        dist.destroy_process_group()\n        time.sleep(0.5)",
        1,
        "raised ValueError: rank 1 is tired",
    ),
}


PLAIN_IN_CI = {"raises", "is killed"}


def cases() -> Iterator[Any]:
    for kind in ROOT_CAUSES:
        yield pytest.param(kind, [], id=f"{kind}-warm")
        yield pytest.param(kind, ["--backend", "gloo"], id=f"{kind}-gloo")
        marks = [] if kind in PLAIN_IN_CI else [pytest.mark.exhaustive]
        yield pytest.param(kind, ["--no-warm"], id=f"{kind}-plain", marks=marks)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("kind", "options"), list(cases()))
def test_the_root_cause_is_named_although_other_ranks_fail_too(kind: str, options: list[str], tmp_path: Path) -> None:
    action, code, words = ROOT_CAUSES[kind]
    script = GROUP + f"if rank == 1:\n    time.sleep(0.1)\n    {action}\ntrain()\n"
    job = run_script(script, "-n", "2", *options, folder=tmp_path)
    assert f"rank 1 {words}" in job.stderr
    assert job.returncode == code
    assert "rank1.log" in job.stderr.partition("rank 1 ")[2]


def test_the_root_cause_is_named_whatever_text_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")  # paths in records and run.json hold the surrogate too
    folder.mkdir()
    message = r"no such file: caf\udce9.png\0\x1b[2J"
    script = GROUP + f"if rank == 1:\n    raise ValueError('{message}')\ntrain()\n"
    job = run_script(script, "-n", "2", folder=folder)
    assert r"rank 1 raised ValueError: no such file: caf\udce9.png\x00\x1b[2J" in job.stderr
    assert "\0" not in job.stderr + job.stdout
    assert job.returncode == 1
    summary = decode_run_summary((folder / "log" / "latest" / "run.json").read_bytes())
    assert summary.failure is not None
    assert "ValueError: no such file" in (folder / "log" / "latest" / "rank1.log").read_text()
    assert summary.failure.error == "raised ValueError: no such file: caf\\udce9.png\0\x1b[2J"


@pytest.mark.exhaustive
def test_an_error_whose_text_cannot_be_made_is_named(tmp_path: Path) -> None:
    script = (
        GROUP
        + """
class Broken(Exception):
    def __str__(self):
        raise RuntimeError
if rank == 1:
    raise Broken
train()
"""
    )
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert "rank 1 raised Broken: " in job.stderr
    assert job.returncode == 1


def test_the_failure_report_is_short_and_ends_with_the_traceback(tmp_path: Path) -> None:
    script = """
import os, time
while os.environ["RANK"] == "0":
    time.sleep(0.1)
def deep(n):
    if n == 0:
        raise KeyError('bottom')
    deep(n - 1) if n % 2 else deep(n - 1)
deep(30)
"""
    job = run_script(script, "-n", "2", folder=tmp_path)
    text = job.stderr[job.stderr.index("rankless: rank") :]
    assert len(text.splitlines()) <= 15
    assert "KeyError: 'bottom'" in text
    assert 'script.py", line 7, in deep' in text
    assert "rankless/runtime" not in job.stderr + job.stdout
    assert job.returncode == 1


SECONDARY = (
    GROUP
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent would end a rank that has not noticed yet
if rank == 1:
    time.sleep(0.1)
    ACTION
train()
"""
)


@pytest.mark.parametrize(
    "action",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        pytest.param("raise ValueError('rank 1 is tired')", marks=pytest.mark.exhaustive),
    ],
)
def test_the_terminal_shows_the_root_cause_first_and_a_line_for_each_other_rank(action: str, tmp_path: Path) -> None:
    job = run_script(SECONDARY.replace("ACTION", action), "-n", "3", "--show", "all", folder=tmp_path)
    assert {line[:4] for line in job.stdout.splitlines()} <= {"[1] "}
    report = job.stderr[job.stderr.index("rankless: rank 1") :].splitlines()
    others = [line for line in report if line.startswith("rankless: after that, rank")]
    assert report[-len(others) - 1 : -1] == others
    assert report[-1].startswith("rankless: failed after ")
    assert len(others) == 2
    for line in others:
        assert re.search(r"rank [02] lost its connection to another rank at script\.py:10, its log file is log/", line)
        log = tmp_path / line.rpartition(" ")[2]
        assert "Traceback" in log.read_text()
    assert "gloo" not in job.stderr


def test_the_terminal_shows_the_whole_traceback_of_rank_0_once_if_it_failed_first(tmp_path: Path) -> None:
    script = (
        GROUP + "import atexit\natexit.register(lambda: print('at exit'))\nif rank == 0:\n    print('before', end='')\n"
    )
    script += "".join(f"def f{i}():\n    f{i + 1}()\n" for i in range(12)) + "def f12():\n    raise KeyError('deep')\n"
    job = run_script(script + "if rank == 0:\n    f0()\ntrain()\n", "-n", "2", folder=tmp_path)
    assert job.stdout == (tmp_path / "log" / "latest" / "rank0.log").read_text()
    assert job.stdout.startswith("before[rank0]: Traceback")
    assert job.stdout.endswith("KeyError: 'deep'\nat exit\n")
    assert job.stdout.count("File") == 14
    assert "rankless: rank 0 raised KeyError: 'deep' at script.py:" in job.stderr


@pytest.mark.exhaustive
def test_equal_errors_on_all_ranks_are_shown_once(tmp_path: Path) -> None:
    job = run_script("import os\nprint(os.environ['RANK'] * 3)\n1 / 0\n", "-n", "3", folder=tmp_path)
    assert job.stderr.count("Traceback") == 1
    assert job.stdout.count("Traceback") == ("rankless: rank 0 raised" in job.stderr)
    assert job.returncode == 1


def test_a_traceback_that_the_script_sends_elsewhere_is_in_the_report(tmp_path: Path) -> None:
    script = "import sys\nsys.stderr = open('elsewhere', 'w')\n1 / 0\n"
    job = run_script(script, "-n", "1", folder=tmp_path)
    assert job.stderr.count("    ZeroDivisionError: division by zero\n") == 1
    assert "ZeroDivisionError" in (tmp_path / "elsewhere").read_text()


@pytest.mark.parametrize("state", ["busy", "stopped", "ignoring SIGTERM"])
def test_the_other_ranks_are_ended_soon(state: str, tmp_path: Path) -> None:
    prepare = {
        "busy": "",
        "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
        "ignoring SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    }[state]
    script = f"""
import os, signal, time
if os.environ["RANK"] == "0":
    open("ready", "w").close()
    {prepare}
    while True:
        time.sleep(0.01)
while not os.path.exists("ready"):
    time.sleep(0.01)
time.sleep(0.2)
open("failed", "w").write(str(time.time()))
1 / 0
"""
    job = run_script(script, "-n", "2", folder=tmp_path)
    # 2 s on a machine that does nothing else (docs/faults.md); nobody waits for them to end by themselves.
    assert time.time() - float((tmp_path / "failed").read_text()) < 10
    assert job.returncode == 1
    assert "rank 1 raised ZeroDivisionError" in job.stderr


def test_a_rank_that_ends_early_and_is_not_needed_is_no_failure(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(0.5)\n    print('done')\n"
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert job.returncode == 0
    assert job.stdout.endswith("done\n")


def test_an_error_in_one_ranks_atexit_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = "import atexit\natexit.register(lambda: print('at exit'))\nraise SystemExit('no more')\n"
    job = run_script(script, "-n", "1", folder=tmp_path)
    assert job.returncode == 1
    assert "no more" in job.stdout
    assert job.stdout.endswith("at exit\n")


def test_a_full_disk_costs_lines_and_never_the_training(tmp_path: Path) -> None:
    logs = tmp_path / "full"
    logs.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k tmpfs {logs}") != 0:
        pytest.skip("needs to mount a small disk")
    script = """
import os
for i in range(2000):
    print('x' * 100)
open('done' + os.environ['RANK'], 'w').close()
"""
    try:
        job = run_script(script, "-n", "2", "--log-dir", str(logs), folder=tmp_path)
    finally:
        os.system(f"umount {logs}")
    assert job.returncode == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
    assert job.stderr.count("rank 0's output is lost from here on") == 1


def test_the_rank_that_failed_first_has_the_time_to_print_its_traceback(tmp_path: Path) -> None:
    script = """
import os, sys, time
while os.environ["RANK"] == "1":
    time.sleep(0.01)
def print_slowly(kind, error, trace):
    time.sleep(0.4)
    print("a pretty traceback of", kind.__name__)
sys.excepthook = print_slowly
1 / 0
"""
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert job.stdout == "a pretty traceback of ZeroDivisionError\n"
    assert "rankless: rank 0 raised ZeroDivisionError" in job.stderr
