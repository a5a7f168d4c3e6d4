"""Runs that end while a server starts again, or because it does not: they name the root cause and leave nothing."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from support.jobs import is_alive, read_process_ids, start_rankless, wait_until
from support.server_jobs import finish, require_nothing_left, run, summary_of
from support.servers import ASK, DURABLE, SERVER, install_server
from support.warm_runs import rankless as rankless_here

from rankless.extensions.servers.launch import processes

pytestmark = pytest.mark.slow

STARTS_FOR_EVER = """
if config["incarnation"]:
    open("restarting", "w").close()
    while True:
        signal.pause()
answer()
"""
"""The end of a stand-in that never serves again."""
SERVES_WITHOUT_TABLES = "listener = serve() if config['incarnation'] else answer()\nsignal.pause()\n"


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("allowed", "note"), [(2, "; servers have been started again 2 times, as --server-"), (0, "")])
def test_more_deaths_than_allowed_end_the_run(allowed: int, note: str, tmp_path: Path):
    script = ASK + "while True:\n    ask(1, kill(1))\n"
    options = ("--server-restarts", str(allowed), "--servers", "2", "--workers", "1")
    job = run(tmp_path, script, *options, server=DURABLE)
    assert job.returncode == 128 + signal.SIGKILL
    assert f"rankless: server 1 was killed by signal 9 (SIGKILL){note}" in job.stderr
    assert job.stderr.count("started again in") == allowed
    summary = summary_of(tmp_path)
    assert summary.failure is not None
    assert (summary.failure.server, summary.server_restarts) == (1, (0, allowed))
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
def test_a_server_that_refuses_its_memory_ends_the_run(tmp_path: Path):
    server = SERVER + "if config['incarnation']:\n    sys.exit(3)\nanswer()\n"
    job = run(tmp_path, ASK + "kill(0)\nsignal.pause()\n", "--servers", "1", "--workers", "1", server=server)
    assert job.returncode == 3
    assert "rankless: server 0 ended with exit code 3 while workers ran, when it was started again\n" in job.stderr
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("restarted", "note"),
    [
        (STARTS_FOR_EVER, ", and did not serve within 0.5 s after it was started again"),
        (SERVES_WITHOUT_TABLES, ", and was started again without its tables"),
    ],
)
def test_a_server_that_does_not_come_back_is_the_root_cause(restarted, note, tmp_path: Path, monkeypatch):
    before = set(psutil.Process().children())  # servers of other tests
    monkeypatch.setattr(processes, "RESTART_SECONDS", 0.5 if "0.5" in note else processes.RESTART_SECONDS)
    (tmp_path / "script.py").write_text(ASK + "kill(0)\nsignal.pause()\n")
    variables = install_server(tmp_path, SERVER + restarted)
    job = rankless_here("run", "--servers", "1", "script.py", folder=tmp_path, **variables)
    assert job.returncode == 128 + signal.SIGKILL
    assert f"rankless: server 0 was killed by signal 9 (SIGKILL){note}\n" in job.stderr
    assert not [each for each in set(psutil.Process().children()) - before if "RANKLESS_SERVER" in each.environ()]
    require_nothing_left(tmp_path)


def test_a_worker_that_fails_during_a_restart_is_the_root_cause(tmp_path: Path):
    script = ASK + "kill(0)\nwait_for('restarting')\nraise ValueError('no data')\n"
    job = run(tmp_path, script, "--servers", "2", "--workers", "1", server=SERVER + STARTS_FOR_EVER)
    assert job.returncode == 1
    assert "rankless: rank 0 raised ValueError: no data at script.py:" in job.stderr
    require_nothing_left(tmp_path)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_agent_during_a_restart_leaves_nothing(number: int, tmp_path: Path):
    (tmp_path / "script.py").write_text(ASK + "kill(1)\nsignal.pause()\n")
    variables = install_server(tmp_path, SERVER + STARTS_FOR_EVER)
    options = ("--no-warm", "--servers", "2", "--workers", "1")
    job = start_rankless("run", *options, "script.py", folder=tmp_path, **variables)
    wait_until(lambda: (tmp_path / "restarting").exists() or job.poll() is not None)
    os.kill(job.pid, number)
    if number == signal.SIGKILL:
        wait_until(lambda: not any(map(is_alive, read_process_ids(tmp_path).values())))
    finish(job, tmp_path)
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)


CANNOT_CONTINUE = (
    ASK
    + """
from rankless.errors import ServerError
ask(0, kill(0))
raise ServerError(
    expected=f"server 0 at {addresses[0]} to answer worker 0",
    found="the connection has broken: the server has ended, or cannot be reached any more",
    fix="see its log",
)
"""
)


@pytest.mark.exhaustive
def test_a_server_is_the_root_cause_if_a_worker_cannot_go_on(tmp_path: Path):
    job = run(tmp_path, CANNOT_CONTINUE, "--servers", "1", "--workers", "1", server=DURABLE)
    assert job.returncode == 128 + signal.SIGKILL
    killed = (
        r"rankless: server 0 was killed by signal 9 \(SIGKILL\), was started again, and rank 0 could not continue\n"
    )
    assert re.search(killed, job.stderr)
    require_nothing_left(tmp_path)


SLOW_RESTART = """
import threading
if config["incarnation"]:
    threading.Event().wait(6.0)
answer()
"""
WAITING_FOR_RANK_0 = (
    ASK
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    ask(0, kill(0))
dist.barrier()
"""
)


@pytest.mark.exhaustive
def test_workers_that_wait_for_a_restart_do_not_hang(tmp_path: Path):
    options = ("--hang-timeout", "4", "--servers", "1", "--workers", "2")
    job = run(tmp_path, WAITING_FOR_RANK_0, *options, server=SERVER + SLOW_RESTART)
    assert (job.returncode, "no progress" in job.stderr) == (0, False), job.stderr
    assert summary_of(tmp_path).server_restarts == (1,)
