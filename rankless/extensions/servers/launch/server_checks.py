"""Check that parameter servers run on a host, and that one that is killed continues with its tables."""

import subprocess
import tempfile

from rankless.errors import ConfigError
from rankless.extensions.servers.launch.options import require_server_packages
from rankless.records.doctor_records import CheckResult, make_failure, make_pass
from rankless.runtime.subprocess_command import module_command

CHECK_NAME = "parameter servers"
TIMEOUT_SECONDS = 180.0
"""For two starts of a server, each of which takes half a minute on a loaded machine. One that fails says so at once."""


def run_check() -> CheckResult:
    """Start a server, make a step on it, kill it, and read the rows from its next process."""
    try:
        require_server_packages()
    except ConfigError as error:
        return make_pass(CHECK_NAME, f"{error.found}; runs with --servers need {error.fix}")
    command = module_command("rankless.extensions.servers.launch.server_test_job")
    try:
        with tempfile.TemporaryDirectory(prefix="rankless-doctor-") as folder:  # removed also after a timeout
            done = subprocess.run(
                [*command, folder], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
    except subprocess.TimeoutExpired:
        return _failure(f"not finished within {TIMEOUT_SECONDS:g} s")
    lines = (done.stdout.strip() or done.stderr.strip() or f"it ended with exit code {done.returncode}").splitlines()
    return make_pass(CHECK_NAME, lines[-1]) if done.returncode == 0 else _failure(lines[-1])


def _failure(text: str) -> CheckResult:
    return make_failure(CHECK_NAME, text, "run rankless run --servers 1 -c 'import rankless', and read its server0.log")
