"""Ctrl-C: one line on the terminal, exit code 130, and what the script itself prints at its end."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.jobs import start_script, wait_until
from support.warm_runs import run_script

from rankless.records.run_json_format import decode_run_summary

pytestmark = pytest.mark.slow

READY = "open('ready' + os.environ['RANK'], 'w').close()"

IN_A_COLLECTIVE = f"""
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
try:
    {READY}
    if os.environ["RANK"] == "1":
        time.sleep(600)
    while True:
        dist.all_reduce(torch.ones(4))
finally:
    print("cleaned up")
"""
IN_PYTHON = f"import os, time\n{READY}\nwhile True:\n    time.sleep(0.01)\n"
IN_A_JOB = f"""
import os, torch, rankless
model = torch.nn.Linear(4, 2)
@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x):
    return model(x).square().mean()
train(torch.ones(4, 4))
{READY}
while True:
    train(torch.ones(4, 4))
"""
AT_EXIT = f"""
import atexit, os, time
atexit.register(lambda: print("synced"))
{READY}
while True:
    time.sleep(0.01)
"""


def are_ready(folder: Path) -> bool:
    return all((folder / f"ready{rank}").exists() for rank in range(2))


@contextmanager
def interrupt_when_ready(folder: Path) -> Iterator[None]:
    """Send this process, which runs the agent, SIGINT as soon as both ranks are ready."""

    def interrupt() -> None:
        wait_until(lambda: are_ready(folder))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param(IN_A_COLLECTIVE, "cleaned up\n", id="in a collective"),
        pytest.param(IN_PYTHON, "", id="in Python", marks=pytest.mark.exhaustive),
        pytest.param(IN_A_JOB, "", id="in a job"),
        pytest.param(AT_EXIT, "synced\n", id="at exit", marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupt_of_the_agent_alone_prints_one_line(script: str, shown: str, tmp_path: Path) -> None:
    with interrupt_when_ready(tmp_path):
        job = run_script(script, "-n", "2", "--no-progress", folder=tmp_path)
    assert job.returncode == 130
    assert job.stdout == shown
    (line,) = [line for line in job.stderr.splitlines() if not line.startswith((" ", "rankless: 2 workers"))]
    assert line.startswith("rankless: ended by SIGINT after ")
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert (summary.outcome, summary.verdict, summary.exit_code) == ("interrupted", "ended by SIGINT", 130)


def test_ctrl_c_prints_one_line_and_the_logs_have_the_tracebacks(tmp_path: Path) -> None:
    job = start_script(IN_A_COLLECTIVE, "-n", "2", folder=tmp_path)
    wait_until(lambda: are_ready(tmp_path))
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert out == "cleaned up\n", err
    assert len(err.splitlines()) == 5
    assert err.splitlines()[-1].startswith("rankless: ended by SIGINT")
    assert "KeyboardInterrupt" in (tmp_path / "log" / "latest" / "rank1.log").read_text()


@pytest.mark.exhaustive
def test_ctrl_c_while_the_workers_start_prints_one_line(tmp_path: Path) -> None:
    # The fork server still imports torch. The workers that it forks then find the interrupt in the first line.
    job = start_script("import time; time.sleep(60); print('never')", "-n", "2", folder=tmp_path)
    wait_until(lambda: (tmp_path / "log" / "latest" / "parent.log").exists())
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith(" ")][1:]
    assert line.startswith("rankless: ended by SIGINT after ")
