"""Whether Rankless itself starts here: a job of two workers in the background, timed to its first collective."""

import contextlib
import secrets
import subprocess
import tempfile
import time
from types import TracebackType

from rankless.records.check_results import Row, failed, passed, warned
from rankless.runtime.python_command import python_command

SLOW_SECONDS = 15.0
MOST_SECONDS = 40.0
WHAT = "start of a job"


class SmallJob:
    """The job, from when it is entered; nothing of it is left afterwards."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._mark = f"began {secrets.token_hex(4)} "
        self._files = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SmallJob":
        if not self._is_wanted:
            return self
        self._output = self._files.enter_context(tempfile.TemporaryFile())
        self._complaints = self._files.enter_context(tempfile.TemporaryFile())
        self._start = time.time()
        self._process = subprocess.Popen(
            [*python_command("rankless.launch.startup_test_job"), self._mark],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._complaints,
            start_new_session=True,  # Ctrl-C is the doctor's
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # its agent ends the workers
            self._process.wait()
        self._files.close()

    def row(self) -> Row:
        """How long it took, once it is over."""
        assert self._process is not None
        try:
            code = self._process.wait(max(0.0, self._start + MOST_SECONDS - time.time()))
        except subprocess.TimeoutExpired:
            return _failure(f"not done within {MOST_SECONDS:g} s")
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            if line.startswith(self._mark) and code == 0:
                seconds = float(line.removeprefix(self._mark)) - self._start
                seen = f"2 workers, {seconds:.1f} s to their first collective"
                fix = "a slow disk, or a host with much else to do; a second start is faster"
                return warned(WHAT, seen, fix) if seconds > SLOW_SECONDS else passed(WHAT, seen)
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return _failure(lines[-1] if lines else f"it ended with exit code {code}")


def _failure(text: str) -> Row:
    return failed(WHAT, f"2 workers: {text}", "try it by hand: rankless run -n 2 -c 'import torch; print(1)'")
