"""Parameter servers on two hosts (network namespaces): how they start, are started again and end, with stand-ins."""

import hashlib
import json
import os
import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import is_alive, read_process_ids, wait_until
from support.server_hosts import A, B, finish, run, start, wait_for_processes
from support.server_jobs import WAITING, summary_of
from support.servers import ASK, DURABLE, SERVE, SERVER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


SLOW_SERVER = (
    SERVER
    + """
import threading
if index == 1:
    threading.Event().wait(1.5)
    print("a worker has started:", os.path.exists("started"), file=sys.stderr)
"""
)
ENDS_LAST = SLOW_SERVER.replace('"ends", file', '"ends, the last worker has ended:", os.path.exists("ended"), file')
MEETING = (
    "open('started', 'w').close()\n"
    + ASK
    + """
rank = int(os.environ["RANK"])
found = [ask(server)[0] for server in range(2)]
if rank == 0:
    os.symlink(f"/proc/{os.getpid()}/exe", "first")
else:
    while not os.path.islink("first") or os.path.exists("first"):  # until the other host's worker has ended
        time.sleep(0.01)
    print(found, [ask(server)[0] for server in range(2)], file=open("seen", "w"))
    open("ended", "w").close()
"""
)


def test_servers_of_all_hosts_serve_before_any_worker_and_end_after_all(hosts: Hosts, tmp_path: Path):
    job = run(hosts, tmp_path, MEETING, server=ENDS_LAST + "answer()\n")
    assert job.codes == [0, 0], job.errors
    assert (tmp_path / "seen").read_text() == "[0, 0] [0, 0]\n"
    logs = [(tmp_path / "log" / "latest" / f"server{index}.log").read_text() for index in range(2)]
    assert logs[0] == "server 0 serves\nserver 0 ends, the last worker has ended: True\n"
    assert logs[1] == ("a worker has started: False\nserver 1 serves\nserver 1 ends, the last worker has ended: True\n")
    assert_table_has_all(job.errors[0])
    assert "host 2 of 2, rank 1, server 1, logs in" in job.errors[1]


def assert_table_has_all(text: str) -> None:
    """Check that host 0's table has the roles, hosts and addresses of all processes."""
    lines = text.splitlines()
    assert re.fullmatch(r"rankless: 2 workers on 2 hosts, 2 servers, logs in log/\S+ on each", lines[0])
    rows = [line.split() for line in lines[1:7]]
    assert rows[0] == ["server", "host", "pid", "address", "log", "file"]
    for index, address in enumerate((A, B)):
        server, worker = rows[1 + index], rows[4 + index]
        assert (server[:2], worker[:2]) == ([str(index), address], [str(index), address])
        assert re.fullmatch(rf"tcp://{re.escape(address)}:\d+", server[3])
        assert re.fullmatch(rf"log/\S+/server{index}\.log", server[4])


DIGEST = """
import hashlib, json, os
token = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"]["servers"]["token"]
with open("digest" + os.environ["RANK"], "w") as file:
    file.write(hashlib.sha256(token.encode()).hexdigest())
"""


@pytest.mark.exhaustive
def test_each_host_derives_the_token_and_no_host_writes_or_sends_it(hosts: Hosts, tmp_path: Path):
    jobs = start(hosts, tmp_path, DIGEST + WAITING)
    ids = wait_for_processes(jobs, tmp_path)
    tokens = {json.loads(psutil.Process(ids[f"server{n}"]).environ()["RANKLESS_SERVER"])["token"] for n in (0, 1)}
    commands = str([psutil.Process(each).cmdline() for each in (*ids.values(), *(job.pid for job in jobs))])
    jobs[0].send_signal(signal.SIGINT)
    job = finish(jobs, tmp_path)
    assert job.codes == [130, 130]
    (token,) = tokens
    assert len(token) == 64
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert [(tmp_path / f"digest{rank}").read_text() for rank in range(2)] == [digest, digest]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not [each for each in (*written, commands.encode(), str(job).encode()) if token.encode() in each]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_server_starts_again_and_workers_of_both_hosts_go_on(killed, hosts: Hosts, tmp_path: Path):
    script = ASK + "".join(
        (
            f"if os.environ['RANK'] == '{1 - killed}':\n    kill({killed})\n",
            f"found = ask({killed}, 1)\n",
            "print(*found[:2], file=open('seen' + os.environ['RANK'], 'w'))\n",
        )
    )
    job = run(hosts, tmp_path, script, server=DURABLE)
    assert job.codes == [0, 0], job.errors
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == ["1 2\n", "1 2\n"]
    host = (A, B)[killed]
    assert len(re.findall(rf"server {killed} on {host} was killed by SIGKILL; started again", job.errors[0])) == 1
    assert summary_of(tmp_path).server_restarts == tuple(int(n == killed) for n in range(2))


ENDS = [
    (
        f"{SERVER}signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))\nanswer()\n",
        "SIGUSR1",
        3,
        "ended with exit code 3",
    ),
    (SERVER + "listener = serve()\nsignal.pause()\n", "SIGKILL", 137, "was killed by signal 9 (SIGKILL)"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("server", "name", "code", "how"), ENDS)
def test_a_server_that_cannot_go_on_ends_the_run_on_all_hosts(server, name, code, how, hosts: Hosts, tmp_path: Path):
    jobs = start(hosts, tmp_path, WAITING, server=server)
    wait_for_processes(jobs, tmp_path)
    os.kill(read_process_ids(tmp_path)["server1"], signal.Signals[name])
    job = finish(jobs, tmp_path)
    assert job.codes == [code, code], job.errors
    for text in job.errors:  # that of the server's own host has it whole, too
        assert f"rankless: server 1 on {B} {how}" in text
        assert re.search(rf"its log file is log/\S+/server1\.log on {B}\S*, this report .*the job was ended", text)
    failure = summary_of(tmp_path).failure
    assert failure is not None
    assert (failure.rank, failure.server, failure.host) == (None, 1, B)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("index", "host"), [(1, B), pytest.param(0, A, marks=pytest.mark.exhaustive)])
def test_a_server_that_cannot_start_ends_the_run_before_any_worker(index, host, hosts: Hosts, tmp_path: Path):
    server = f"{SERVER}if index == {index}:\n    raise RuntimeError('no memory for rows')\n" + SERVE.removeprefix(
        SERVER
    )
    job = run(hosts, tmp_path, "open('started', 'w').close()", server=server)
    assert job.codes == [2, 2], job.errors
    for text in job.errors:
        assert f"expected: server {index} to serve at tcp://{host}:" in text
        assert "RuntimeError: no memory for rows" in text
        assert re.search(rf"correct what its log file names: log/\S+/server{index}\.log", text)
    assert not (tmp_path / "started").exists()


LEAVES_EARLY = WAITING.replace("signal.pause()", "os.environ['RANK'] == '1' or signal.pause()")


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [WAITING, LEAVES_EARLY], ids=["with workers", "without workers"])
def test_a_host_that_dies_takes_its_servers_with_it_and_is_named(script: str, hosts: Hosts, tmp_path: Path):
    jobs = start(hosts, tmp_path, script, server=DURABLE)
    ids = wait_for_processes(jobs, tmp_path)
    if script is LEAVES_EARLY:
        wait_until(lambda: not is_alive(ids["rank1"]))
        wait_until(
            lambda: not psutil.Process(jobs[1].pid).children() or len(psutil.Process(jobs[1].pid).children()) == 1
        )
    jobs[1].kill()
    wait_until(lambda: not is_alive(ids["server1"]))
    job = finish(jobs, tmp_path)
    assert job.codes == [1, -signal.SIGKILL], job.errors
    assert f"rankless: host {B} was lost: the connection" in job.errors[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["link", "kill"])
def test_servers_and_workers_end_on_a_host_that_has_lost_the_first(how: str, hosts: Hosts, tmp_path: Path):
    jobs = start(hosts, tmp_path, WAITING, server=DURABLE)
    wait_for_processes(jobs, tmp_path)
    try:
        if how == "link":
            hosts.link("b", up=False)
        else:
            jobs[0].kill()
        job = finish(jobs, tmp_path)
    finally:
        hosts.link("b", up=True)
    assert job.codes == [1 if how == "link" else -signal.SIGKILL, 1], job.errors
    assert f"rankless: host 0, {A}, was lost: " in job.errors[1]
    assert how == "kill" or f"rankless: host {B} was lost: no heartbeat for" in job.errors[0]


@pytest.mark.exhaustive
def test_a_stopped_server_of_another_host_is_named(hosts: Hosts, tmp_path: Path):
    script = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + WAITING
    jobs = start(hosts, tmp_path, script, servers=(f"--servers={A},{B} --hang-timeout=4",) * 2)
    wait_for_processes(jobs, tmp_path)
    server = read_process_ids(tmp_path)["server1"]
    os.kill(server, signal.SIGSTOP)
    job = finish(jobs, tmp_path)
    assert job.codes == [1, 1], job.errors
    doing = rf"does not answer: it is stopped by a signal \(kill -CONT {server} resumes it\)"
    assert re.search(rf"no progress for .*\n  server 1 on {B} {doing}\n", job.errors[0])
    assert re.search(rf"rankless: server 1 on {B} {doing}; ", job.errors[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", [1, 0])
def test_an_interrupt_while_servers_start_ends_both_hosts(place: int, hosts: Hosts, tmp_path: Path):
    server = SERVER + "if index == 1:\n    while True:\n        signal.pause()\n" + SERVE.removeprefix(SERVER)
    jobs = start(hosts, tmp_path, "open('started', 'w').close()", server=server)
    wait_for_processes(jobs, tmp_path, 2)
    jobs[place].send_signal(signal.SIGINT)
    job = finish(jobs, tmp_path)
    assert job.codes == ([130, 130] if place == 1 else [130, 2]), job.errors
    assert ("host 0 received a signal" if place == 0 else f"host {B} received SIGINT") in job.errors[1 - place]
    assert not (tmp_path / "started").exists()


SLOW_AND_STUBBORN = """
import threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if index == {index}:
    threading.Event().wait(6.0)
answer()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [0, 1])
def test_servers_that_start_slowly_and_ignore_their_end_lose_no_host(index: int, hosts: Hosts, tmp_path: Path):
    server = SERVER + SLOW_AND_STUBBORN.format(index=index)
    job = run(hosts, tmp_path, "print('done')", server=server)
    assert (job.codes, job.outputs) == ([0, 0], ["done\n", ""]), job.errors


@pytest.mark.exhaustive
def test_a_server_that_dies_after_the_workers_of_its_host_starts_again(hosts: Hosts, tmp_path: Path):
    script = ASK + textwrap.dedent(
        """
        if os.environ["RANK"] == "0":
            wait_for("ended")
            print(*ask(1, kill(1))[:2])
        """
    )
    jobs = start(hosts, tmp_path, script, server=DURABLE)
    wait_until(lambda: "server1" in read_process_ids(tmp_path) or any(job.poll() is not None for job in jobs))
    agent = psutil.Process(jobs[1].pid)
    log = tmp_path / "log" / "latest" / "rank1.log"
    wait_until(lambda: log.exists() and len(agent.children()) == 1)  # the server alone
    (tmp_path / "ended").touch()
    job = finish(jobs, tmp_path)
    assert (job.codes, job.outputs) == ([0, 0], ["1 2\n", ""]), job.errors
