"""Jobs as a user starts them: `rankless run` in a process of its own, in a folder of its own."""

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
"""Only what hangs takes so long; a busy machine may take four times as long as an idle one."""


def rankless(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a `rankless` command prints and returns."""
    return subprocess.run(
        [*RANKLESS, *arguments],
        cwd=folder,
        env=environment_of_jobs(environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def start_rankless(
    *arguments: str, folder: Path, command: Sequence[str] = RANKLESS, **environment: str
) -> subprocess.Popen[str]:
    """A `rankless` command that goes on; its group is its own, so that Ctrl-C can be sent to it."""
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=environment_of_jobs(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A shell that runs the tests in its background has SIGINT ignored, nohup SIGHUP; children would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run_script(text: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `rankless run OPTIONS script.py` prints and returns for a script of this text."""
    (folder / "script.py").write_text(text)
    return rankless("run", *options, "script.py", folder=folder, **environment)


def start_script(text: str, *options: str, folder: Path) -> subprocess.Popen[str]:
    """A job of a script of this text that goes on."""
    (folder / "script.py").write_text(text)
    return start_rankless("run", *options, "script.py", folder=folder)


def wait_until(condition: Callable[[], bool], *, seconds: float = DEADLINE_SECONDS) -> float:
    """How long it took until `condition` held; fails if it never did."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - start


def is_alive(process_id: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(folder: Path) -> dict[str, int]:
    """Process ids by name, of the processes of a job that have written `NAME.pid` into `folder`."""
    found = {}
    for path in folder.glob("*.pid"):
        text = path.read_text()
        if text.endswith("\n"):
            found[path.stem] = int(text)
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Kill a job's agent if it lives still."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def environment_of_jobs(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment with these variables, and without what decides how jobs run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "RANKLESS_"))}
    return environment | changes
