"""Runs `python script.py ARGUMENTS` without a launcher, in a process that has torch imported already.

For tests of how such processes communicate, not of how Python starts.
"""

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.processes import DEADLINE_SECONDS, fork_server_context


class WarmProcess:
    """A running script.

    Args:
        script: The script, in whose folder it runs.
        arguments: Its arguments.
        folder: Where its output is written. Default: beside the script.
    """

    def __init__(self, script: Path, *arguments: object, folder: Path | None = None) -> None:
        self._command = [script.name, *map(str, arguments)]
        self._texts = [(folder or script.parent) / f"{script.stem}-{id(self)}.{name}" for name in ("out", "err")]
        self._process = fork_server_context().Process(
            target=_run_script, args=(script.parent, self._command, self._texts)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end, and return exit code and output.

        Kills the process and raises TimeoutExpired if it hangs.
        """
        self._process.join(DEADLINE_SECONDS)
        if self._process.is_alive():
            self.kill()
            raise subprocess.TimeoutExpired(self._command, DEADLINE_SECONDS)
        code = self._process.exitcode
        assert code is not None
        return subprocess.CompletedProcess(self._command, code, *(text.read_text() for text in self._texts))


def run_warm(script: Path, *arguments: object) -> str:
    """Run a script to its end, and return its output. Fails with its errors if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = WarmProcess(script, *arguments, folder=Path(folder)).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(processes: Sequence[WarmProcess]) -> list[tuple[int, str, str]]:
    """Wait for the end of all, and return exit code, output and errors of each.

    Raises TimeoutExpired if one hangs. Its notes are the exit codes of those that have ended before.
    """
    found: list[tuple[int, str, str]] = []
    for process in processes:
        try:
            done = process.wait()
        except subprocess.TimeoutExpired as error:
            error.add_note(f"exit codes of the processes before it: {[code for code, *_ in found]}")
            raise
        found.append((done.returncode, done.stdout, done.stderr))
    return found


def _run_script(folder: Path, command: list[str], texts: Sequence[Path]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # Linux's default in Python 3.11
    os.chdir(folder)
    for descriptor, text in enumerate(texts, start=1):
        with text.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable(file=2)
    sys.argv[:] = command
    sys.path[0] = str(folder)
    runpy.run_path(command[0], run_name="__main__")
