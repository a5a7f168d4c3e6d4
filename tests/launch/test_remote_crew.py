"""Workers of an elastic job on a host that cannot take part: why it is let go of."""

import os
import selectors
import sys
import time
from pathlib import Path

import pytest

from rankless.launch.elastic.pipes import Task
from rankless.launch.elastic.remote_crew import RemoteCrew
from rankless.launch.hosts.host_facts import own_versions
from rankless.plan.elastic import Elastic
from rankless.plan.run_plan import JobStart, Program, RunRequest

ANOTHER_HOST = """
import os, sys
from rankless.launch.elastic.pipes import Here, Pipe
versions = {versions!r}
Pipe(0, 1).send(Here(address="10.7.0.2", interface="eth0", driver_address="10.7.0.1", versions=versions))
os.set_blocking(0, True)
while sys.stdin.buffer.read(1 << 16):
    pass
"""


def lost(crew: RemoteCrew) -> str:
    """Why the host is lost, or nothing if it is there and stays."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and crew.here is None and not crew.has_ended():
        list(crew.turn())
    return crew.why_lost() if crew.has_ended() else ""


@pytest.mark.parametrize("torch_version", ["1.0.0", None])
def test_a_host_with_another_version_is_refused_with_what_to_do(
    torch_version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    versions = own_versions() | ({} if torch_version is None else {"torch": torch_version})
    (tmp_path / "there.py").write_text(ANOTHER_HOST.format(versions=versions))
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/there.py\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
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
    task = Task(program=program, request=RunRequest(worker_count=1), start=start, folder=str(tmp_path), environment={})
    with selectors.DefaultSelector() as selector:
        crew = RemoteCrew("b", task, Elastic(min_workers=1), selector=selector, writes={})
        try:
            why = lost(crew)
        finally:
            crew.close()
    mine = own_versions()["torch"]
    expected = f"the version of torch is 1.0.0, expected {mine}: install torch {mine} there"
    assert why == ("" if torch_version is None else expected)
