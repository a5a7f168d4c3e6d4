"""Starts jobs as a user does: `rankless run` in a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

RANKLESS = (sys.executable, "-m", "rankless")
DEADLINE_SECONDS = 120.0
"""Only a test that hangs takes so long. A busy machine may take four times as long as an idle one."""


def rankless(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `rankless` command, and return its output and exit code."""
    return subprocess.run(
        [*RANKLESS, *arguments],
        cwd=folder,
        env=job_environment(environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def start_rankless(
    *arguments: str, folder: Path, command: Sequence[str] = RANKLESS, **environment: str
) -> subprocess.Popen[str]:
    """Start a `rankless` command in a process group of its own, so that a test can send it Ctrl-C."""
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=job_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=restore_interrupts,
    )


def restore_interrupts() -> None:
    """Restore SIGINT and SIGHUP: a background shell ignores the first, nohup the second, and children inherit it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run_script(text: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `rankless run OPTIONS script.py` with a script of this text, and return its output and exit code."""
    (folder / "script.py").write_text(text)
    return rankless("run", *options, "script.py", folder=folder, **environment)


def start_script(text: str, *options: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `rankless run OPTIONS script.py` with a script of this text."""
    (folder / "script.py").write_text(text)
    return start_rankless("run", *options, "script.py", folder=folder, **environment)


def wait_until(condition: Callable[[], bool], *, seconds: float = DEADLINE_SECONDS) -> float:
    """Wait until `condition` holds, and return how long it took. Fails after `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - start


def is_alive(process_id: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_process_ids(folder: Path) -> dict[str, int]:
    """Return the process ids that a job's processes have written to `NAME.pid` in `folder`, by name."""
    found = {}
    for path in folder.glob("*.pid"):
        text = path.read_text()
        if text.endswith("\n"):
            found[path.stem] = int(text)
    return found


def kill_job(process: subprocess.Popen[str]) -> None:
    """Kill a job's agent, if it is still alive."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def job_environment(changes: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with these variables, and without those that change how jobs run."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OMP_", "RANKLESS_")) or key == "OMP_WAIT_POLICY"
    }
    return environment | changes
