"""Workers of an elastic job on a host that cannot take part: why it is let go of."""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from support.jobs import wait_until

from rankless.config.elastic import Elastic
from rankless.config.run_config import JobStart, Program, RunRequest
from rankless.launch.elastic.member import ElasticWorker
from rankless.launch.elastic.remote_workers import RemoteWorkers
from rankless.launch.elastic.ssh_protocol import Task
from rankless.launch.rendezvous.host_facts import installed_versions
from rankless.records.events import Exited

ANOTHER_HOST = """
import os, sys
from rankless.launch.elastic.ssh_protocol import Here, Pipe
versions = {versions!r}
Pipe(0, 1).send(Here(address="10.7.0.2", interface="eth0", driver_address="10.7.0.1", versions=versions))
os.set_blocking(0, True)
while sys.stdin.buffer.read(1 << 16):
    pass
"""


def lost(crew: RemoteWorkers) -> str:
    """Why the host is lost, or nothing if it is there and stays."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and crew.here is None and not crew.has_ended():
        list(crew.turn())
    return crew.why_lost() if crew.has_ended() else ""


@contextlib.contextmanager
def crew_by(ssh: str, folder: Path) -> Iterator[RemoteWorkers]:
    """The crew of a host to which such a command is the way."""
    (folder / "ssh").write_text(f"#!/bin/sh\nexec {ssh}\n")
    (folder / "ssh").chmod(0o755)
    start = JobStart(
        run_id="r",
        seed=1,
        workers=(1,),
        backend="gloo",
        master_address="",
        master_port=0,
        store_address="",
        store_port=0,
    )
    program = Program(kind="code", target="")
    task = Task(program=program, request=RunRequest(worker_count=1), start=start, folder=str(folder), environment={})
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    with patch.dict(os.environ, PATH=path), selectors.DefaultSelector() as selector:
        crew = RemoteWorkers("b", task, Elastic(min_workers=1), selector=selector, writes={})
        try:
            yield crew
        finally:
            crew.close()


@pytest.mark.parametrize("torch_version", ["1.0.0", None])
def test_a_host_with_another_version_is_refused_with_what_to_do(torch_version: str | None, tmp_path: Path):
    versions = installed_versions() | ({} if torch_version is None else {"torch": torch_version})
    (tmp_path / "there.py").write_text(ANOTHER_HOST.format(versions=versions))
    with crew_by(f"{sys.executable} {tmp_path}/there.py", tmp_path) as crew:
        why = lost(crew)
    mine = installed_versions()["torch"]
    expected = f"the version of torch is 1.0.0, expected {mine}: install torch {mine} there"
    assert why == ("" if torch_version is None else expected)


def test_a_host_that_does_not_answer_holds_up_no_end(tmp_path: Path):
    with crew_by("sleep 600", tmp_path) as crew:
        (ssh,) = [child for child in psutil.Process().children() if child.name() in ("ssh", "sh", "sleep")]
        crew.start(ElasticWorker(number=7, host="b", slot=0, owes_since=0.0))
        assert list(crew.turn()) == []
        assert not crew.has_ended()
        crew.signal(signal.SIGINT)
        assert crew.has_ended()
        wait_until(lambda: not ssh.is_running() or ssh.status() == psutil.STATUS_ZOMBIE)
        assert [record.exit_code for record in crew.turn() if isinstance(record, Exited)] == [-signal.SIGKILL]
