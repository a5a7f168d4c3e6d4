"""A host that has parameter servers and no worker: how it starts, is supervised and ends. Servers are stand-ins."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import ROOT, Hosts, two_hosts
from support.jobs import is_alive, wait_until
from support.server_hosts import RUN_BY_HAND, A, B, finish, run, start, wait_for_processes
from support.server_jobs import WAITING, summary_of
from support.servers import ASK, DURABLE, SERVER, install_server

pytestmark = pytest.mark.slow

LONE = {"servers": (f"--servers={B}:6170,{B}",) * 2, "workers": f"--workers={A},{A}"}
"""Two servers on b, and two workers on a."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


ENDS = SERVER.replace('"ends", file', '"ends, the last worker has ended:", os.path.exists("ended1"), file')
ENDING = ASK + (
    "rank = os.environ['RANK']\nfound = [ask(server)[0] for server in range(2)]\n"
    "print(found, os.environ['LOCAL_WORLD_SIZE'])\nopen('ended' + rank, 'w').close()\n"
    "wait_for('ended' + str(1 - int(rank)))\n"
)


def test_a_host_of_servers_alone_starts_first_and_ends_last(hosts: Hosts, tmp_path: Path):
    job = run(hosts, tmp_path, ENDING, server=ENDS + "answer()\n", **LONE)
    assert (job.codes, job.outputs) == ([0, 0], ["[0, 0] 2\n", ""]), job.errors
    for index in range(2):
        log = (tmp_path / "log" / "latest" / f"server{index}.log").read_text()
        assert log == f"server {index} serves\nserver {index} ends, the last worker has ended: True\n"
    assert job.errors[0].startswith("rankless: 2 workers on 2 hosts, 2 servers, logs in")
    assert re.search(rf"^ +0 +{re.escape(B)} +\d+ +tcp://{re.escape(B)}:6170 ", job.errors[0], re.MULTILINE)
    assert "rankless: host 2 of 2, no ranks, servers 0 and 1, logs in" in job.errors[1]


def test_its_agent_has_no_process_but_servers_and_imports_no_torch(hosts: Hosts, tmp_path: Path):
    jobs = start(hosts, tmp_path, WAITING, server=DURABLE, **LONE)
    ids = wait_for_processes(jobs, tmp_path)
    agent = psutil.Process(jobs[1].pid)
    assert {each.pid for each in agent.children(recursive=True)} == {ids["server0"], ids["server1"]}
    assert not [each.path for each in agent.memory_maps() if "libtorch" in each.path]
    jobs[0].send_signal(signal.SIGTERM)
    job = finish(jobs, tmp_path)
    assert job.codes == [143, 143], job.errors
    assert f"{A} was stopped by SIGTERM" in job.errors[1]


@pytest.mark.exhaustive
def test_a_server_killed_on_it_starts_again(hosts: Hosts, tmp_path: Path):
    script = ASK + "if os.environ['RANK'] == '1':\n    kill(1)\nprint(*ask(1, 1)[:2])\n"
    job = run(hosts, tmp_path, script, server=DURABLE, **LONE)
    assert (job.codes, job.outputs) == ([0, 0], ["1 2\n", ""]), job.errors
    assert summary_of(tmp_path).server_restarts == (0, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["kill", "SIGTERM", "link", "server"])
def test_its_loss_ends_the_run_and_is_named(how: str, hosts: Hosts, tmp_path: Path):
    server = DURABLE if how != "server" else SERVER + "listener = serve()\nsignal.pause()\n"
    jobs = start(hosts, tmp_path, WAITING, server=server, **LONE)
    ids = wait_for_processes(jobs, tmp_path)
    try:
        if how == "link":
            hosts.link("b", up=False)
        elif how == "server":
            os.kill(ids["server1"], signal.SIGKILL)
        else:
            jobs[1].send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        wait_until(lambda: not is_alive(ids["server1"]))
        job = finish(jobs, tmp_path)
    finally:
        hosts.link("b", up=True)
    codes, text = {
        "kill": ([1, -9], f"host {B} was lost: the connection"),
        "SIGTERM": ([143, 143], f"host {B} received SIGTERM"),
        "link": ([1, 1], f"host {B} was lost: no heartbeat"),
        "server": ([137, 137], f"server 1 on {B} was killed by signal 9"),
    }[how]
    assert job.codes == codes, job.errors
    assert text in job.errors[0]
    assert text.replace(f" on {B}", "") in summary_of(tmp_path).verdict
    assert how != "link" or f"host 0, {A}, was lost: " in job.errors[1]
    assert how != "link" or "; 2 servers here ended" in job.errors[1]


@pytest.mark.exhaustive
def test_a_stopped_server_on_it_is_named(hosts: Hosts, tmp_path: Path):
    script = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + WAITING
    jobs = start(hosts, tmp_path, script, **LONE)
    server = wait_for_processes(jobs, tmp_path)["server1"]
    os.kill(server, signal.SIGSTOP)
    job = finish(jobs, tmp_path)
    assert job.codes == [1, 1], job.errors
    assert (
        f"server 1 on {B} does not answer: it is stopped by a signal (kill -CONT {server} resumes it)" in job.errors[0]
    )


@pytest.mark.exhaustive
def test_a_host_of_servers_needs_no_script(hosts: Hosts, tmp_path: Path):
    other = tmp_path / "b"
    other.mkdir()
    jobs = start(hosts, tmp_path, "print('done')", server=DURABLE, names="a", **LONE)
    variables = install_server(other, DURABLE)
    line = (*RUN_BY_HAND, LONE["servers"][0], LONE["workers"], "script.py")
    jobs.append(hosts.start("b", line, cwd=other, env=variables | {"PYTHONPATH": f"{other}{os.pathsep}{ROOT}"}))
    job = finish(jobs, tmp_path)
    assert (job.codes, job.outputs) == ([0, 0], ["done\n", ""]), job.errors
    assert (other / "log" / "latest" / "server1.log").exists()
    assert not (other / "script.py").exists()


def test_the_line_without_ssh_flags_on_a_host_of_servers_names_the_first_host(hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text("pass")
    line = (sys.executable, "-m", "rankless", "run", f"--servers={B}", f"--workers={A}", "script.py")
    done = hosts.run("b", line, cwd=tmp_path)
    assert done.returncode == 2
    assert f"this command on host 0, {A}, which starts the others by ssh" in done.stderr


@pytest.mark.exhaustive
def test_a_host_of_servers_needs_the_ports_of_servers_alone(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as apart:
        apart.firewall("b", open_ports=(22, 9988, 6170, 6171))
        lists = {"servers": (f"--servers={B}:6170,{B}:6171",) * 2, "workers": f"--workers={A},{A}"}
        job = run(apart, tmp_path, "print('done')", server=DURABLE, **lists)
    assert (job.codes, job.outputs) == ([0, 0], ["done\n", ""]), job.errors
