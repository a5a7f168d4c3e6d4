"""Check that a job starts here: run one with two workers in the background, and time it to its first collective."""

import contextlib
import secrets
import subprocess
import tempfile
import time
from types import TracebackType

from rankless.records.check_results import CheckResult, make_failure, make_pass, make_warning
from rankless.runtime.subprocess_command import python_command

SLOW_START_SECONDS = 15.0
TIMEOUT_SECONDS = 40.0
CHECK_NAME = "start of a job"


class StartupTest:
    """The test job; leaving the context ends it and removes its files."""

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._marker = f"began {secrets.token_hex(4)} "
        self._files = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "StartupTest":
        if not self._is_enabled:
            return self
        self._output = self._files.enter_context(tempfile.TemporaryFile())
        self._stderr_file = self._files.enter_context(tempfile.TemporaryFile())
        self._start = time.time()
        self._process = subprocess.Popen(
            [*python_command("rankless.launch.startup_test_job"), self._marker],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._stderr_file,
            start_new_session=True,  # Ctrl-C must reach the doctor only
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # its agent ends the workers
            self._process.wait()
        self._files.close()

    def result(self) -> CheckResult:
        """Wait for the job and return how long it took."""
        assert self._process is not None
        try:
            code = self._process.wait(max(0.0, self._start + TIMEOUT_SECONDS - time.time()))
        except subprocess.TimeoutExpired:
            return _failure(f"not finished within {TIMEOUT_SECONDS:g} s")
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            if line.startswith(self._marker) and code == 0:
                seconds = float(line.removeprefix(self._marker)) - self._start
                seen = f"2 workers, {seconds:.1f} s to their first collective"
                fix = "check for a slow disk or a busy host; a second start is faster"
                return (
                    make_warning(CHECK_NAME, seen, fix) if seconds > SLOW_START_SECONDS else make_pass(CHECK_NAME, seen)
                )
        self._stderr_file.seek(0)
        lines = self._stderr_file.read().decode(errors="replace").strip().splitlines()
        return _failure(lines[-1] if lines else f"it ended with exit code {code}")


def _failure(text: str) -> CheckResult:
    return make_failure(CHECK_NAME, f"2 workers: {text}", "run rankless run -n 2 -c 'import torch; print(1)'")
