"""`rankless` command lines in this process, one after the other, with one import of torch for all of them: for tests
of what happens within a run, and of what is said of it. What a shell, a signal or a cold start brings is not here:
tests of these take the same functions from `jobs`.

Command, agent, warm parent and workers are the real ones. They get their environment from this process, and warm
parents from its fork server (docs/decisions/0016); a run that the server cannot serve, having other variables or
`--no-warm`, starts as ever.
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

from support.jobs import DEADLINE_SECONDS, environment_of_jobs

from rankless.cli import main
from rankless.config.run_config import Program, RunConfig, RunRequest
from rankless.config.validation import make_run_config
from rankless.launch import agent
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient, Readable


def rankless(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a `rankless` command prints and returns, as `jobs.rankless` does."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, environment_of_jobs(environment), clear=True),
        patch.object(agent, "AgentContext", _context_with_fork_server),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _ended_in_time(),
    ):
        try:
            code = main(arguments)
        except SystemExit as refused:  # argparse's
            code = refused.code if isinstance(refused.code, int) else 1
    return subprocess.CompletedProcess(["rankless", *arguments], code, out.getvalue(), err.getvalue())


def run_script(text: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `rankless run OPTIONS script.py` prints and returns for a script of this text, as `jobs.run_script` does."""
    (folder / "script.py").write_text(text)
    return rankless("run", *options, "script.py", folder=folder, **environment)


class SharedForkServer(ForkServerPoolClient):
    """Serves all tests of this process: what changes from test to test is no difference of their environments."""

    def is_ready(self, config: RunConfig, *, until: Readable) -> bool:
        """As a fork server's, with one order of hashes for all runs: it is fixed when Python starts."""
        with patch.dict(os.environ, {"PYTHONHASHSEED": "5"}):
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            return super().is_ready(config, until=until)


_servers: list[SharedForkServer] = []


def fork_server() -> SharedForkServer:
    """The one of this process: it has imported what jobs need, whether or not the first run calls any."""
    if not _servers:
        server = SharedForkServer()
        _servers.append(server)
        with patch.dict(os.environ, environment_of_jobs({}), clear=True), Interrupts() as interrupts:
            program = Program(kind="code", target="import rankless")
            server.is_ready(make_run_config(program, RunRequest(worker_count=1)), until=interrupts)
    return _servers[0]


def close_fork_server() -> None:
    """End what imported torch for all runs."""
    while _servers:
        _servers.pop().close()


_AGENT_CONTEXT = agent.AgentContext


def _context_with_fork_server(**given: object) -> agent.AgentContext:
    """Return the context of an agent of this process, always with the one fork server."""
    return _AGENT_CONTEXT(**(given | {"fork_server": fork_server()}))  # type: ignore[arg-type]


@contextlib.contextmanager
def _ended_in_time() -> Iterator[None]:
    """Whatever hangs is ended as a user would end it; `verify` makes several runs, one after the other."""
    timer = threading.Timer(2 * DEADLINE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
