"""Runs in this process, one after the other, with one import of torch: for tests of what happens within a run.

The agent, the warm parent and the workers are the real ones; only the command line around them is left out.
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankless.launch import agent
from rankless.launch.fork_server_process import ForkServerProcess
from rankless.plan.check import make_run_plan
from rankless.plan.run_plan import Program, RunRequest

SEED = 5
"""One for all: it decides the order of hashes, which is fixed when Python starts."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a run has ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class RunsInARow:
    """Runs scripts; all of them call jobs, or none does."""

    fork_server: ForkServerProcess = field(default_factory=ForkServerProcess)

    def run(self, text: str, *, workers: int, folder: Path) -> Done:
        """What `rankless run -n WORKERS script.py` prints and returns for a script of this text, in `folder`."""
        (folder / "script.py").write_text(text)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(folder):
            program = Program(kind="script", target="script.py")
            plan = make_run_plan(program, RunRequest(worker_count=workers, seed=SEED, progress=False))
            outside = agent.Outside(fork_server=self.fork_server)
            code = agent.run(plan, on_record=lambda _: None, out=out, err=err, outside=outside)
        return Done(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def runs_in_a_row() -> Iterator[RunsInARow]:
    """To be made a fixture of a module."""
    runs = RunsInARow()
    with runs.fork_server:
        yield runs
