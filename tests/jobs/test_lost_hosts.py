"""Runs with copies of servers continue without a lost host of servers, or a lost server, and train as one device."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.hosts import Hosts, some_hosts
from support.jobs import wait_until
from support.server_jobs import summary_of
from support.warm_process import run_warm
from support.warm_runs import rankless

from rankless.extensions.servers.config import SERVER

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts/lose_hosts.py"
STEPS = 60
LINE = ("run", "--servers", "b:6170,c", "--copies", "1", "--workers", "a,a", "--no-progress")
"""Server 0 and the copy of server 1 are on b; server 1 and the copy of server 0 are on c."""


LOST = "  host b was lost, and the run continues without it\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with some_hosts(tmp_path_factory.mktemp("four"), "abcd") as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return json.loads(run_warm(SCRIPT, "--plain", "--steps", STEPS))


def require_same(output: str, plain: list[float]) -> None:
    assert json.loads(output.splitlines()[-1]) == pytest.approx(plain, rel=0, abs=1e-11)


def start(hosts: Hosts, folder: Path, line: Sequence[str] = LINE, *options: str) -> subprocess.Popen[str]:
    """Start the training on several hosts, with further options of the script."""
    script = (str(SCRIPT), "--steps", str(STEPS), *options)
    return hosts.start("a", (sys.executable, "-m", "rankless", *line, *script), cwd=folder)


def read_status(hosts: Hosts, name: str, folder: Path) -> str:
    return hosts.run(name, (sys.executable, "-m", "rankless", "status"), cwd=folder).stdout


def wait_for_step(job: subprocess.Popen[str], folder: Path, step: int) -> None:
    def has_step() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return int((folder / "step").read_text().split()[0]) >= step
        return False

    wait_until(lambda: has_step() or job.poll() is not None)


def has_server(hosts: Hosts, name: str) -> bool:
    with contextlib.suppress(AssertionError):
        return find_agent(hosts, name) > 0
    return False


def find_agent(hosts: Hosts, name: str) -> int:
    """Return the process id of the agent of a host, which is the parent of its servers."""
    for process_id in hosts.processes(name):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(process_id)
            if SERVER in process.environ():
                return process.ppid()
    raise AssertionError(f"no server on {name}")


def lose(hosts: Hosts, name: str, how: str) -> None:
    if how == "link":
        hosts.link(name, up=False)
    else:
        os.kill(find_agent(hosts, name), signal.SIGKILL)


def go_on_without(hosts: Hosts, name: str, how: str, job: subprocess.Popen[str]) -> tuple[str, str]:
    """Lose a host, and return what the run writes, which must end in order."""
    try:
        lose(hosts, name, how)
        output, errors = job.communicate(timeout=120)
    finally:
        hosts.link(name, up=True)
    assert job.returncode == 0, errors
    return output, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "name", "step"), [("kill", "b", 4), ("link", "b", 4), ("kill", "c", 0), ("link", "c", STEPS // 2)]
)
def test_a_run_goes_on_without_a_lost_host_of_servers(how, name, step, hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path)
    wait_for_step(job, tmp_path, step)
    output, errors = go_on_without(hosts, name, how, job)
    require_same(output, plain)
    reason = "no heartbeat for" if how == "link" else "the connection"
    alone = {
        "b": "server 2 in place of server 0, server 1 without a copy",
        "c": "server 3 in place of server 1, server 0 without a copy",
    }[name]
    assert re.search(rf"rankless: host {name} was lost: {reason}.*; the run continues with {alone}\n", errors), errors
    summary = summary_of(tmp_path)
    assert (summary.lost_hosts, len(summary.lost_servers), summary.replicas) == ((name,), 2, 1)
    assert summary.verdict.endswith(f", host {name} lost")
    table = re.findall(r"^ +(\d)  (\d?) +([abc]) +\d+  tcp://\S+", errors, re.MULTILINE)
    assert table == [("0", "", "b"), ("1", "", "c"), ("2", "0", "c"), ("3", "1", "b")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_a_host_may_be_lost_at_any_moment(seed: int, hosts: Hosts, tmp_path: Path, plain):
    generator = random.Random(seed)
    how, name = generator.choice(["kill", "link"]), generator.choice("bc")
    job = start(hosts, tmp_path)
    wait_for_step(job, tmp_path, generator.randrange(STEPS // 2))
    threading.Event().wait(generator.uniform(0, 0.1))
    output, _ = go_on_without(hosts, name, how, job)
    require_same(output, plain)


@pytest.mark.exhaustive
def test_the_loss_of_both_hosts_ends_the_run_and_names_them(hosts: Hosts, tmp_path: Path):
    job = start(hosts, tmp_path)
    wait_for_step(job, tmp_path, 3)
    agents = [find_agent(hosts, name) for name in "bc"]
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 1, errors
    assert re.search(
        r"rankless: host ([bc]) was lost: .*; servers \d and \d, which had the same tables, are lost\n", errors
    )
    summary = summary_of(tmp_path)
    assert summary.failure is not None
    assert {*summary.lost_hosts, summary.failure.host} == {"b", "c"}
    assert "were lost" not in summary.verdict


COUNT = Path(__file__).parent / "scripts/count_steps.py"


def count_undisturbed(mode: Sequence[str], folder: Path) -> list[float]:
    """Return what the training gives without a loss: on one device, but with `geo`, which is another training."""
    if mode[0] != "geo":
        return json.loads(run_warm(COUNT, "--plain", "--steps", "60"))
    line = ("run", "--servers", "2", "--workers", "2", "--no-progress", "--server-mode", *mode, str(COUNT))
    done = rankless(*line, "--steps", "60", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "name", "mode"),
    [
        ("kill", "b", ("async",)),
        ("link", "c", ("bounded", "--staleness", "2")),
        ("kill", "c", ("geo", "--geo-steps", "3")),
        ("link", "b", ("async",)),
    ],
)
def test_each_step_of_independent_workers_counts_once(how, name, mode, hosts: Hosts, tmp_path: Path):
    """The gradients do not depend on values, so all orders of steps have one result."""
    line = (sys.executable, "-m", "rankless", *LINE, "--server-mode", *mode, str(COUNT), "--steps", "60")
    job = hosts.start("a", line, cwd=tmp_path)
    wait_for_step(job, tmp_path, 10)
    output, errors = go_on_without(hosts, name, how, job)
    found = json.loads(output.splitlines()[-1])
    assert found == pytest.approx(count_undisturbed(mode, tmp_path), rel=0, abs=1e-11)
    assert f"host {name} was lost" in errors


TWO_HOSTS_OF_WORKERS = ("run", "--servers", "b,c", "--copies", "1", "--workers", "a,d", "--no-progress")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "name"), [("link", "b"), ("kill", "c")])
def test_workers_of_all_hosts_go_on_without_a_lost_host(how: str, name: str, hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path, TWO_HOSTS_OF_WORKERS)
    wait_for_step(job, tmp_path, 6)
    output, _ = go_on_without(hosts, name, how, job)
    require_same(output, plain)


WORKERS_AND_SERVERS = ("run", "--servers", "b,d", "--copies", "1", "--workers", "a,d", "--no-progress")
"""Worker 1, server 1 and the copy of server 0 are on d."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "step"), [("kill", 6), ("link", 20), ("kill", 33)])
def test_a_lost_host_may_have_workers_and_servers(how: str, step: int, hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path, WORKERS_AND_SERVERS)
    wait_for_step(job, tmp_path, step)
    output, errors = go_on_without(hosts, "d", how, job)
    assert json.loads(output.splitlines()[-1]) == pytest.approx(plain, rel=0, abs=1e-10)
    assert re.search(r"host d was lost: .*; its tables continue with server 3 in place of server 1, server 0 w", errors)
    assert re.search(r"host d was lost: .*; 1 worker ended there; 1 worker continues", errors)
    summary = summary_of(tmp_path)
    assert (summary.lost_workers, summary.lost_hosts, sorted(summary.lost_servers)) == (1, ("d",), [1, 2])


@pytest.mark.exhaustive
def test_the_loss_of_a_host_with_workers_ends_the_run_if_none_may_be_lost(hosts: Hosts, tmp_path: Path):
    job = start(hosts, tmp_path, (*WORKERS_AND_SERVERS, "--min-workers", "2"))
    wait_for_step(job, tmp_path, 6)
    lose(hosts, "d", "kill")
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 1, errors
    assert "rankless: host d was lost: the connection" in errors


@pytest.mark.exhaustive
def test_a_frozen_agent_is_lost_and_ends_its_servers_when_it_goes_on(hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path, (*LINE, "--hang-timeout", "0"), "--hold", "5")
    wait_for_step(job, tmp_path, 5)
    agent = psutil.Process(find_agent(hosts, "b"))
    servers = agent.children()
    agent.suspend()
    try:
        wait_until(lambda: LOST in read_status(hosts, "a", tmp_path))
    finally:
        agent.resume()
    wait_until(lambda: not [each for each in servers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])
    (tmp_path / "go").touch()
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    require_same(output, plain)
    assert "host b was lost: no heartbeat" in errors


@pytest.mark.exhaustive
def test_a_short_break_of_the_network_loses_nothing(hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path)
    wait_for_step(job, tmp_path, 6)
    hosts.link("b", up=False)
    threading.Event().wait(1.5)
    hosts.link("b", up=True)
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    require_same(output, plain)
    assert summary_of(tmp_path).lost_hosts == ()


@pytest.mark.exhaustive
def test_a_host_that_is_lost_while_workers_start_is_not_needed(hosts: Hosts, tmp_path: Path, plain):
    job = start(hosts, tmp_path)
    log = tmp_path / "log" / "latest" / "rank1.log"
    wait_until(lambda: (log.exists() and has_server(hosts, "c")) or job.poll() is not None)
    lose(hosts, "c", "kill")
    output, errors = job.communicate(timeout=120)
    if job.returncode == 0:
        require_same(output, plain)
    else:  # not all servers had served yet
        assert "expected: all hosts to start the parameter servers" in errors


@pytest.mark.exhaustive
def test_status_shows_a_lost_host_and_copies(hosts: Hosts, tmp_path: Path):
    job = start(hosts, tmp_path, (*LINE, "--hang-timeout", "0"), "--hold", "5")
    wait_for_step(job, tmp_path, 5)
    text = read_status(hosts, "c", tmp_path)
    assert re.search(r"^  server .* copy of  address", text, re.MULTILINE), text
    assert re.search(r"^ +2 .* 0  tcp://10.77.0.3:", text, re.MULTILINE), text
    lose(hosts, "b", "kill")
    wait_until(lambda: LOST in read_status(hosts, "a", tmp_path))
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors


ONE_HOST = ("run", "--servers", "1", "--copies", "1", "--workers", "2", "--server-restarts", "0", "--no-progress")


@pytest.mark.parametrize("server", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_goes_on_without_a_server_that_is_not_started_again(server: int, tmp_path: Path, plain):
    done = rankless(*ONE_HOST, str(SCRIPT), "--steps", str(STEPS), "--kill", f"5:{server}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    require_same(done.stdout, plain)
    alone = ("server 1 in place of server 0", "server 0 without a copy")[server]
    assert f"rankless: server {server} was killed by SIGKILL; the run continues with {alone}\n" in done.stderr
    assert "that covers a lost server, and not a lost host" in done.stderr
    assert summary_of(tmp_path).lost_servers == (server,)


@pytest.mark.exhaustive
def test_the_loss_of_a_server_and_its_copy_ends_the_run_and_names_both(tmp_path: Path):
    done = rankless(*ONE_HOST, str(SCRIPT), "--kill", "5:1,9:0", folder=tmp_path)
    assert done.returncode == 137, done.stderr
    assert (
        "server 0 was killed by signal 9 (SIGKILL); server 1, which had the same tables, was lost before" in done.stderr
    )
    assert summary_of(tmp_path).failure.server == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", ["5:0", "5:1", "5:0,5:1", "5:0,6:1,7:0"])
def test_killed_servers_with_copies_start_again(kills: str, tmp_path: Path, plain):
    line = ("run", "--servers", "1", "--copies", "1", "--workers", "2", "--no-progress")
    done = rankless(*line, str(SCRIPT), "--steps", str(STEPS), "--kill", kills, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    require_same(done.stdout, plain)
    assert sum(summary_of(tmp_path).server_restarts) == len(kills.split(","))
