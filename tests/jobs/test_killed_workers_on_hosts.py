"""Runs of jobs on several hosts, without servers, continue without killed workers and without a lost host."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import wait_until
from support.killed_jobs import TRAINING, ZERO_KINDS, require_same_training, run_plain
from support.server_jobs import summary_of

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KIND = "norm and dropout"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return run_plain(tmp_path_factory.mktemp("plain"), KIND)


def start(
    hosts: Hosts, folder: Path, kills: str, *options: str, workers: int = 2, kind: str = KIND, replaces: bool = False
):
    """Start a run from host a whose workers or hosts are killed as `kills` says."""
    options = options if replaces else ("--no-replace", *options)
    text = TRAINING.replace('os.environ.get("KILLS", "")', repr(kills))  # ssh passes no variables on
    (folder / "script.py").write_text(f"KIND = {kind!r}\n{text}")
    listed = ",".join(f"{name}:{workers}" for name in "ab")
    words = (sys.executable, "-m", "rankless", "run", "--hosts", listed, "--devices", "cpu", *options, "script.py")
    return hosts.start("a", words, cwd=folder)


KILLS = {
    "one of the other host": ("3:7:0", 3),
    "all of the other host": ("2:5:0,3:12:0.5", 2),
    "one of each host": ("0:once0:0,3:14:0.2", 2),
    "all of the first host": ("1:3:0,0:predict1:0", 2),
    "the other host": ("host:9:0", 2),
    "a worker and then the other host": ("0:4:0,host:save1:0", 1),
}


@pytest.mark.parametrize("name", KILLS)
def test_the_others_continue(hosts: Hosts, tmp_path: Path, plain, name: str):
    kills, left = KILLS[name]
    job = start(hosts, tmp_path, kills)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    require_same_training(tmp_path, plain, left=left)
    assert summary_of(tmp_path).lost_workers == 4 - left


@pytest.mark.parametrize(
    ("kills", "left"),
    [("3:7:0", 4), ("1:once0:0,3:14:0.2", 3), ("2:5:0,3:12:0.5", 4), ("host:9:0", 2), ("0:4:0,host:save1:0", 1)],
)
def test_a_worker_is_replaced_on_its_own_host(hosts: Hosts, tmp_path: Path, plain, kills: str, left: int):
    job = start(hosts, tmp_path, kills, replaces=True)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    require_same_training(tmp_path, plain, left=left)
    summary = summary_of(tmp_path)
    assert summary.lost_workers - summary.replaced_workers == 4 - left


@pytest.mark.parametrize("kind", ZERO_KINDS[::2])
@pytest.mark.parametrize("name", KILLS)
def test_the_others_have_copies_of_shards(hosts: Hosts, tmp_path: Path, kind: str, name: str):
    kills, left = KILLS[name]
    job = start(hosts, tmp_path, kills, "--copies", "1", kind=kind)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    (tmp_path / "plain").mkdir()
    require_same_training(tmp_path, run_plain(tmp_path / "plain", kind), left=left)


@pytest.mark.parametrize("name", KILLS)
def test_the_others_continue_on_a_mesh_of_their_own(hosts: Hosts, tmp_path: Path, name: str):
    kills, left = KILLS[name]
    kills = kills.replace("0:once0:0,3:14", "0:once0:0,2:14")  # 0 and 3 alone have the same part after the first loss
    job = start(hosts, tmp_path, kills, "--mesh", "data=2,tensor=2", kind="accumulate")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    (tmp_path / "plain").mkdir()
    require_same_training(tmp_path, run_plain(tmp_path / "plain", "accumulate"), left=left)


def test_a_lost_host_with_all_workers_of_a_stage_ends_the_run(hosts: Hosts, tmp_path: Path):
    job = start(hosts, tmp_path, "host:9:0", "--mesh", "pipeline=2,data=2", kind="accumulate")
    out, err = job.communicate(timeout=240)
    assert job.returncode not in (0, None), out + err
    assert "and its optimizer state, or a copy of them" in out + err


@pytest.mark.parametrize("worker", [1, 2])
def test_a_frozen_worker_of_any_host_is_killed_and_the_others_continue(hosts: Hosts, tmp_path, plain, worker: int):
    job = start(hosts, tmp_path, f"{worker}:9:frozen", "--hang-timeout", "4")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    assert re.search(rf"rankless: rank {worker} did not arrive: it is stopped by a signal", err), err
    assert re.search(rf"worker {worker} .*was killed by SIGKILL; 3 workers continue\n", err), err
    require_same_training(tmp_path, plain, left=3)


def test_the_others_continue_if_a_host_cannot_be_reached(hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path, "link:9:0")
    try:
        wait_until((tmp_path / "reached").exists)
        hosts.link("b", up=False)
        (tmp_path / "cut").touch()
        out, err = job.communicate(timeout=240)
    finally:
        hosts.link("b", up=True)
    assert job.returncode == 0, out + err
    require_same_training(tmp_path, plain, left=2)
    assert re.search(r"host b was lost: .+; 2 workers ended there; 2 workers continue", err)


@pytest.mark.parametrize("options", [(), ("--min-workers", "1")])
def test_with_one_worker_on_each_host_the_option_decides(hosts: Hosts, tmp_path: Path, plain, options):
    job = start(hosts, tmp_path, "1:6:0", *options, workers=1)
    out, err = job.communicate(timeout=240)
    assert job.returncode == (0 if options else 137), out + err
    if options:
        require_same_training(tmp_path, plain, left=1)
