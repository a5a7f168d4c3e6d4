"""Runs `rankless` commands in this process, one after the other, with one import of torch for all.

For tests of what happens within a run, and of its output. Tests of shells, signals and cold starts use the same
functions of `jobs`.

Command, agent, fork server and workers are real. They get their environment from this process, and the fork servers
come from its fork server pool (docs/decisions/0016). A run that the pool cannot serve, with other variables or with
`--no-warm`, starts as usual.
"""

import contextlib
import functools
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from support.jobs import DEADLINE_SECONDS, job_environment
from support.processes import WORKER_MODULES

from rankless.cli import main
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Program, RunConfig, RunRequest
from rankless.launch import agent
from rankless.launch.signal_reader import Interrupts
from rankless.launch.supervisor import fork_server_client
from rankless.launch.supervisor.fork_server_client import ForkServerPoolClient, Readable
from rankless.runtime.subprocess_command import python_command

TRANSFORMERS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "llama", "t5", "vit"))
"""Modules whose import takes twice as long as that of torch."""


def rankless(
    *arguments: str, folder: Path, preload: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a `rankless` command, and return its output and exit code, as `jobs.rankless` does.

    The fork server pool has also imported the modules in `preload`.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, job_environment(environment), clear=True),
        patch.object(agent, "AgentContext", functools.partial(_make_context, preload)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _time_limit(),
    ):
        try:
            code = main(arguments)
        except SystemExit as error:  # from argparse
            code = error.code if isinstance(error.code, int) else 1
    return subprocess.CompletedProcess(["rankless", *arguments], code, out.getvalue(), err.getvalue())


def run_script(
    text: str, *options: str, folder: Path, preload: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `rankless run OPTIONS script.py` with a script of this text, as `jobs.run_script` does."""
    (folder / "script.py").write_text(text)
    return rankless("run", *options, "script.py", folder=folder, preload=preload, **environment)


class SharedForkServerPool(ForkServerPoolClient):
    """Serves all tests of this process, and ignores the variables that pytest changes from test to test.

    It has imported what the workers of a run without a pool import in each process.

    Args:
        preload: The modules that it imports besides those that every pool imports.
    """

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._preload = preload

    def is_ready(self, config: RunConfig, *, until: Readable) -> bool:
        """Return whether the pool is ready, with one hash seed for all runs: Python reads it only when it starts."""
        with (
            patch.dict(os.environ, {"PYTHONHASHSEED": "5"}),
            patch.object(fork_server_client, "python_command", self._make_command),
        ):
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            return super().is_ready(config, until=until)

    def _make_command(self, module: str) -> list[str]:
        """Return the command of the pool's process, with further imports before its own."""
        start = f"from {module} import main\n"
        imports = "".join(f"import {name}\n" for name in (*WORKER_MODULES, *self._preload))
        return [part.replace(start, imports + start) for part in python_command(module)]


_pools: dict[tuple[str, ...], SharedForkServerPool] = {}


def fork_server_pool(preload: tuple[str, ...] = ()) -> SharedForkServerPool:
    """Return a pool of this process, which has imported what jobs need, even if the first run calls none."""
    if preload not in _pools:
        pool = _pools[preload] = SharedForkServerPool(preload)
        with patch.dict(os.environ, job_environment({}), clear=True), Interrupts() as interrupts:
            program = Program(kind="code", target="import rankless")
            pool.is_ready(make_run_config(program, RunRequest(worker_count=1)), until=interrupts)
    return _pools[preload]


def close_fork_server_pool() -> None:
    """End the pools."""
    while _pools:
        _pools.popitem()[1].close()


_AGENT_CONTEXT = agent.AgentContext


def _make_context(preload: tuple[str, ...], **given: object) -> agent.AgentContext:
    """Return the context of an agent of this process, always with the fork servers of one pool."""
    return _AGENT_CONTEXT(**(given | {"fork_server": fork_server_pool(preload)}))  # type: ignore[arg-type]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """End a command that hangs, by SIGTERM. The limit is long because `verify` makes up to four runs."""
    timer = threading.Timer(6 * DEADLINE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
