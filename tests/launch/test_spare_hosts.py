"""A run that has lost a host saves, and starts again with a spare host or with the lost one, as the same training."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.hosts import Hosts, some_hosts
from support.jobs import wait_until
from support.preempted_jobs import FORMS, PLAIN, TRAINING
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

LINE = (sys.executable, "-m", "rankless", "run", "--devices", "cpu", "--no-progress", "--env", "PAUSE")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with some_hosts(tmp_path_factory.mktemp("three"), "abc") as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.py").write_text(PLAIN.replace("EVERY", "1").replace("READERS", "{}"))
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True)
    return torch.load(folder / "results.pt")


def start(hosts: Hosts, folder: Path, *options: str, text: str = TRAINING, pause: float) -> subprocess.Popen[str]:
    """Start the training, with a pause of some seconds after each step."""
    counted = text.replace("    calls += 1\n", "    calls += 1\n    open(f'calls{calls}', 'w').close()\n")
    (folder / "script.py").write_text(counted)
    return hosts.start("a", (*LINE, *options, "script.py"), cwd=folder, env={"PAUSE": str(pause)})


def require_same(folder: Path, plain: dict) -> None:
    found = torch.load(folder / "results.pt")
    for name in ("model", "states"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-10, atol=1e-13)


def end(hosts: Hosts, job: subprocess.Popen[str], folder: Path, *, link: str = "", killed: str = "") -> str:
    """Lose a host after five steps, and return what the run writes to standard error, which must end in order."""
    wait_until(lambda: (folder / "calls5").exists() or job.poll() is not None)
    try:
        if link:
            hosts.link(link, up=False)
        for process_id in hosts.processes(killed) if killed else ():
            with contextlib.suppress(psutil.Error):
                if "agent of" in " ".join(psutil.Process(process_id).cmdline()):
                    os.kill(process_id, signal.SIGKILL)
        _, errors = job.communicate(timeout=180)
    finally:
        if link:
            hosts.link(link, up=True)
    assert job.returncode == 0, errors
    return errors


@pytest.mark.parametrize(
    ("how", "reason"),
    [("killed", "the connection"), pytest.param("link", "no heartbeat for", marks=pytest.mark.exhaustive)],
)
def test_a_spare_host_takes_the_place_of_a_lost_one(how: str, reason: str, hosts: Hosts, tmp_path: Path, plain: dict):
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", pause=0.4)
    errors = end(hosts, job, tmp_path, **{how: "b"})
    assert f"host b was lost: {reason}" in errors
    assert "2 workers continue\n" in errors
    assert "rankless: host c takes the place of host b; the run starts again from its checkpoint\n" in errors
    assert errors.count("rankless: 4 workers") == 2
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_lost_host_returns(hosts: Hosts, tmp_path: Path, plain: dict):
    job = start(hosts, tmp_path, "--hosts", "a:1,b:2", pause=1.0)
    errors = end(hosts, job, tmp_path, killed="b")
    assert "host b was lost: the connection" in errors, errors
    assert "rankless: host b is back; the run starts again from its checkpoint\n" in errors
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_run_that_cannot_continue_starts_again_on_the_spare_host(hosts: Hosts, tmp_path: Path, plain: dict):
    text = FORMS["saved too"].replace("optimizer=optimizer)\ndef", 'optimizer=optimizer, zero="parameters")\ndef')
    options = ("--hosts", "a:2,b:2,c:2", "--spares", "1", "--restarts", "1")
    errors = end(hosts, start(hosts, tmp_path, *options, text=text, pause=0.3), tmp_path, link="b")
    assert "started again, restart 1 of 1\n" in errors
    assert "rankless: host c takes the place of host b\n" in errors
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_script_that_heeds_no_request_trains_on_with_fewer(hosts: Hosts, tmp_path: Path, plain: dict):
    text = TRAINING.replace(", autosave=True", "")
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", text=text, pause=0.5)
    errors = end(hosts, job, tmp_path, link="b")
    assert errors.count("rankless: host c could join, if the script saved when it is asked to stop: ") == 1
    assert errors.count("rankless: 4 workers") == 1
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_spare_host_that_does_not_answer_is_named_at_the_start(hosts: Hosts, tmp_path: Path, plain: dict):
    hosts.link("c", up=False)
    try:
        job = start(hosts, tmp_path, "--hosts", "a:1,b:1,c:1", "--spares", "1", pause=0.5)
        _, errors = job.communicate(timeout=120)
    finally:
        hosts.link("c", up=True)
    assert job.returncode == 0, errors
    assert "rankless: the spare host c cannot be used: " in errors
    require_same(tmp_path, plain)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("-n", "2", "--spares", "1"), "--spares 1 with this host only"),
        (("--hosts", "127.0.0.1:1,b:1", "--spares", "1"), "--spares 1 with 2 hosts"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "-1"), "--spares -1 with 3 hosts"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--no-ssh"), "--spares 1 with a command on each host"),
        (("--hosts", "127.0.0.1:1,b:2,c:1", "--spares", "1"), "c with 1"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--no-replace"), "found:    --no-replace"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--servers", "1"), "options of servers"),
    ],
)
def test_spares_that_no_run_can_have_are_refused(tmp_path: Path, options: tuple[str, ...], found: str):
    (tmp_path / "train.py").write_text("print(1)")
    done = rankless("run", *options, "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr
