"""Runs on several hosts continue without killed workers, and without a lost host that has no servers."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import wait_until
from support.lost_weights import TRAINING as WEIGHTS
from support.lost_weights import require_same_weights, run_plain_weights
from support.lost_workers import TRAINING as TABLES
from support.lost_workers import require_same_training, run_plain
from support.server_jobs import summary_of

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")

RANKLESS = (sys.executable, "-m", "rankless")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return run_plain(tmp_path_factory.mktemp("plain"))


def start_killed(hosts: Hosts, folder: Path, kills: str, *options: str, text: str = TABLES):
    """Start a run from host a whose workers or hosts are killed as `kills` says."""
    text = text.replace("GATHERS", "False").replace("READS", "False").replace(", MORE", "")
    text = text.replace('os.environ.get("KILLS", "")', repr(kills))  # ssh passes no variables on
    (folder / "script.py").write_text(text.replace(", WORKERS", ""))
    line = [*RANKLESS, "run", *(options or ("--servers", "a", "--workers", "a,a,b,b")), "script.py"]
    return hosts.start("a", line, cwd=folder)


def run_killed(hosts: Hosts, folder: Path, kills: str, *options: str, **more) -> str:
    job = start_killed(hosts, folder, kills, *options, **more)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    return out + err


KILLS = {
    "one of the other host": "3:7:0",
    "all of the other host": "2:5:0,3:12:0.5",
    "one of each host": "0:once0:0,3:14:0.2",
    "all of the first host": "1:3:0,0:predict1:0",
    "the other host": "host:9:0",
    "a worker and then the other host": "0:4:0,host:save1:0",
}
SURVIVORS = dict(zip(KILLS, (3, 2, 2, 2, 2, 1), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["one of each host", *(each for each in KILLS if each[:3] != "one"), *list(KILLS)[:1]])
def test_the_others_go_on(hosts: Hosts, tmp_path: Path, plain, name: str):
    text = run_killed(hosts, tmp_path, KILLS[name])
    assert require_same_training(tmp_path, plain)["size"] == SURVIVORS[name]
    assert f"{SURVIVORS[name]} worker" in text
    summary = summary_of(tmp_path)
    assert (summary.lost_workers, summary.exit_code) == (4 - SURVIVORS[name], 0)


@pytest.mark.exhaustive
def test_weights_on_servers_go_on_without_a_host(hosts: Hosts, tmp_path: Path):
    (tmp_path / "plain").mkdir()
    text = run_killed(hosts, tmp_path, "1:4:0,host:schedule9.0:0", text=WEIGHTS)
    assert require_same_weights(tmp_path, run_plain_weights(tmp_path / "plain"))["size"] == 1
    assert re.search(r"host b was lost: .+; 2 workers ended there; 1 worker continues", text)


@pytest.mark.exhaustive
def test_one_worker_on_each_host(hosts: Hosts, tmp_path: Path, plain):
    run_killed(hosts, tmp_path, "1:6:0", "--servers", "a", "--workers", "a,b")
    assert require_same_training(tmp_path, plain)["size"] == 1


@pytest.mark.exhaustive
def test_the_others_go_on_if_a_host_cannot_be_reached(hosts: Hosts, tmp_path: Path, plain):
    job = start_killed(hosts, tmp_path, "link:9:0")
    try:
        wait_until((tmp_path / "reached").exists)
        hosts.link("b", up=False)
        (tmp_path / "cut").touch()
        out, err = job.communicate(timeout=240)
    finally:
        hosts.link("b", up=True)
    assert job.returncode == 0, out + err
    assert require_same_training(tmp_path, plain)["size"] == 2
    assert "; 2 workers ended there; 2 workers continue" in err


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("--servers", "a,b"), ("--servers", "a", "--min-workers", "3")])
def test_a_lost_host_with_servers_or_too_many_workers_ends_the_run(hosts: Hosts, tmp_path: Path, options):
    job = start_killed(hosts, tmp_path, "host:9:0", *options, "--workers", "a,a,b,b")
    _, err = job.communicate(timeout=240)
    assert job.returncode == 1
    assert "host b was lost" in err
