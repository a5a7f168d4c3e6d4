"""The workers of an elastic job on a host that cannot take part."""

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

from rankless.config.run_config import AgreedJobConfig, Elastic, Program, RunRequest
from rankless.extensions.horovodrun.elastic.remote_workers import RemoteWorkers
from rankless.extensions.horovodrun.elastic.ssh_protocol import HostTask
from rankless.launch.recovery.membership import ElasticWorker
from rankless.launch.rendezvous.host_consistency import installed_versions
from rankless.records.events import Exited

OTHER_AGENT = """
import os, sys
from rankless.extensions.horovodrun.elastic.ssh_protocol import AgentReady, PipeConnection
versions = {versions!r}
ready = AgentReady(address="10.7.0.2", interface="eth0", driver_address="10.7.0.1", versions=versions)
PipeConnection(0, 1).send(ready)
os.set_blocking(0, True)
while sys.stdin.buffer.read(1 << 16):
    pass
"""


def wait_for_loss(workers: RemoteWorkers) -> str:
    """Return why the host is lost, or "" once its agent runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and workers.agent is None and not workers.has_ended():
        list(workers.poll())
    return workers.explain_loss() if workers.has_ended() else ""


@contextlib.contextmanager
def start_remote_workers(ssh: str, folder: Path) -> Iterator[RemoteWorkers]:
    """Start the agent of a host with the command `ssh` in place of the system's."""
    (folder / "ssh").write_text(f"#!/bin/sh\nexec {ssh}\n")
    (folder / "ssh").chmod(0o755)
    start = AgreedJobConfig(
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
    request = RunRequest(worker_count=1)
    task = HostTask(
        program=program, request=request, start=start, folder=str(folder), environment={}, store_token="secret"
    )
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    with patch.dict(os.environ, PATH=path), selectors.DefaultSelector() as selector:
        workers = RemoteWorkers("b", task, Elastic(min_workers=1), selector=selector, writes={})
        try:
            yield workers
        finally:
            workers.close()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("torch_version", ["1.0.0", None])
def test_a_host_with_another_version_is_refused_with_a_fix(torch_version: str | None, tmp_path: Path):
    versions = installed_versions() | ({} if torch_version is None else {"torch": torch_version})
    (tmp_path / "there.py").write_text(OTHER_AGENT.format(versions=versions))
    with start_remote_workers(f"{sys.executable} {tmp_path}/there.py", tmp_path) as workers:
        reason = wait_for_loss(workers)
    mine = installed_versions()["torch"]
    expected = f"the version of torch is 1.0.0, expected {mine}: install torch {mine} there"
    assert reason == ("" if torch_version is None else expected)


def test_a_host_that_does_not_answer_does_not_delay_the_end(tmp_path: Path):
    with start_remote_workers("sleep 600", tmp_path) as workers:
        (ssh,) = [child for child in psutil.Process().children() if child.name() in ("ssh", "sh", "sleep")]
        workers.start(ElasticWorker(number=7, host="b", slot=0, expected_since=0.0))
        assert list(workers.poll()) == []
        assert not workers.has_ended()
        workers.signal(signal.SIGINT)
        assert workers.has_ended()
        wait_until(lambda: not ssh.is_running() or ssh.status() == psutil.STATUS_ZOMBIE)
        assert [record.exit_code for record in workers.poll() if isinstance(record, Exited)] == [-signal.SIGKILL]
