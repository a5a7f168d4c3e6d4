"""Runs on several hosts with heterogeneous workers go on without killed workers, and without a lost host."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.lost_heterogeneous import (
    require_same_heterogeneous,
    run_plain_heterogeneous,
    write_killed_heterogeneous,
)
from support.server_jobs import summary_of

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")

RANKLESS = (sys.executable, "-m", "rankless")
WORKERS = ("--servers", "a", "--workers", "a,a,b", "--heter-workers", "a,b")
"""Ranks 0 and 1 are on the CPU and rank 2 is heterogeneous on host a; 3 and 4 are so on host b."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


KILLS = {
    "the other host": "host:9:0",
    "a heterogeneous worker of the first host": "2:dense7:0",
    "one of each host": "0:once0:0,4:14:0.2",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KILLS)
def test_the_others_of_two_kinds_go_on(hosts: Hosts, tmp_path: Path, name: str):
    write_killed_heterogeneous(tmp_path, KILLS[name], looks=True)
    job = hosts.start("a", [*RANKLESS, "run", *WORKERS, "script.py"], cwd=tmp_path)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    (tmp_path / "plain").mkdir()
    require_same_heterogeneous(tmp_path, run_plain_heterogeneous(tmp_path / "plain"))
    assert summary_of(tmp_path).lost_workers == (1 if name.startswith("a ") else 2)
