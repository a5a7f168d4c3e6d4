"""Runs `rankless` commands in this process, one after the other, with one import of torch for all.

For tests of what happens within a run, and of its output. Tests of shells, signals and cold starts use the same
functions of `jobs`.

Command, agent, fork server and workers are real. They get their environment from this process, and the fork servers
come from its fork server pool (docs/decisions/0016). A run that the pool cannot serve, with other variables or with
`--no-warm`, starts as usual.
"""

import contextlib
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from support.jobs import DEADLINE_SECONDS, job_environment

from rankless.cli import main
from rankless.config.run_config import Program, RunConfig, RunRequest
from rankless.config.validation import make_run_config
from rankless.launch import agent
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient, Readable


def rankless(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `rankless` command, and return its output and exit code, as `jobs.rankless` does."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, job_environment(environment), clear=True),
        patch.object(agent, "AgentContext", _context_with_fork_server),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _time_limit(),
    ):
        try:
            code = main(arguments)
        except SystemExit as error:  # from argparse
            code = error.code if isinstance(error.code, int) else 1
    return subprocess.CompletedProcess(["rankless", *arguments], code, out.getvalue(), err.getvalue())


def run_script(text: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `rankless run OPTIONS script.py` with a script of this text, as `jobs.run_script` does."""
    (folder / "script.py").write_text(text)
    return rankless("run", *options, "script.py", folder=folder, **environment)


class SharedForkServerPool(ForkServerPoolClient):
    """Serves all tests of this process, and ignores the variables that pytest changes from test to test."""

    def is_ready(self, config: RunConfig, *, until: Readable) -> bool:
        """Return whether the pool is ready, with one hash seed for all runs: Python reads it only when it starts."""
        with patch.dict(os.environ, {"PYTHONHASHSEED": "5"}):
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            return super().is_ready(config, until=until)


_pools: list[SharedForkServerPool] = []


def fork_server_pool() -> SharedForkServerPool:
    """Return the pool of this process, which has imported what jobs need, even if the first run calls none."""
    if not _pools:
        pool = SharedForkServerPool()
        _pools.append(pool)
        with patch.dict(os.environ, job_environment({}), clear=True), Interrupts() as interrupts:
            program = Program(kind="code", target="import rankless")
            pool.is_ready(make_run_config(program, RunRequest(worker_count=1)), until=interrupts)
    return _pools[0]


def close_fork_server_pool() -> None:
    """End the pool."""
    while _pools:
        _pools.pop().close()


_AGENT_CONTEXT = agent.AgentContext


def _context_with_fork_server(**given: object) -> agent.AgentContext:
    """Return the context of an agent of this process, always with the one fork server."""
    return _AGENT_CONTEXT(**(given | {"fork_server": fork_server_pool()}))  # type: ignore[arg-type]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """End a command that hangs, by SIGTERM. The limit is long because `verify` makes several runs."""
    timer = threading.Timer(2 * DEADLINE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
