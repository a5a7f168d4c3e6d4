"""Parameter servers of a run: they start before its workers, end after them, and leave nothing behind."""

import os
import re
import signal
import stat
from pathlib import Path

import psutil
import pytest
from support.jobs import is_alive, read_process_ids, start_rankless, wait_until
from support.server_jobs import finish, require_nothing_left, run, start, summary_of
from support.servers import SERVE, SERVER, install_server
from support.warm_runs import rankless as rankless_here

from rankless.extensions.servers.launch import processes
from rankless.extensions.servers.launch.addresses import FOLDER_PREFIX

pytestmark = pytest.mark.slow

SEEN_BY_WORKERS = """
import json, os, socket
plan = json.loads(os.environ["RANKLESS_WORKER_PLAN"])
for address in plan["roles"]["servers"]["addresses"]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address.removeprefix("ipc://"))
folder = os.path.dirname(address.removeprefix("ipc://"))
print(len(plan["roles"]["servers"]["addresses"]), oct(os.stat(folder).st_mode & 0o777), folder)
open("worker-ended", "w").close()
"""
ENDS_LAST = SERVER.replace('"ends", file', '"ends after the worker:", os.path.exists("worker-ended"), file')


def test_servers_serve_before_workers_start_and_end_after_them(tmp_path: Path):
    server = ENDS_LAST + SERVE.removeprefix(SERVER)
    job = run(tmp_path, SEEN_BY_WORKERS, "--servers", "2", "--workers", "1", server=server)
    count, mode, folder = job.stdout.split()
    assert (job.returncode, count, mode) == (0, "2", oct(stat.S_IRWXU))
    assert not Path(folder).exists()
    logs = [(tmp_path / "log" / "latest" / f"server{index}.log").read_text() for index in range(2)]
    assert logs == [f"server {index} serves\nserver {index} ends after the worker: True\n" for index in range(2)]
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
def test_the_table_shows_servers_with_process_address_and_log_file(tmp_path: Path):
    job = run(tmp_path, "", "--servers", "2", "-n", "1")
    lines = job.stderr.splitlines()
    assert re.fullmatch(r"rankless: 1 worker, \d+ threads? each, 2 servers, plain processes, logs in log/\S+", lines[0])
    assert lines[1].split() == ["server", "pid", "address", "log", "file"]
    for index, line in enumerate(lines[2:4]):
        shown, process_id, address, log_file = line.split()
        assert (shown, int(process_id)) == (str(index), read_process_ids(tmp_path)[f"server{index}"])
        assert re.fullmatch(rf"ipc:///\S+/{FOLDER_PREFIX}\w+/{index}", address)
        assert (tmp_path / log_file).read_text().startswith(f"server {index} serves\n")
    assert lines[4].split() == ["rank", "pid", "device", "log", "file"]


@pytest.mark.exhaustive
def test_the_token_stands_in_no_table_log_or_command_line(tmp_path: Path):
    job = start(tmp_path)
    process_ids = read_process_ids(tmp_path)
    server = psutil.Process(process_ids["server0"])
    token = re.search(r'"token":"(\w+)"', server.environ()["RANKLESS_SERVER"])
    assert token is not None
    assert len(token[1]) == 64
    commands = [psutil.Process(each).cmdline() for each in (*process_ids.values(), job.pid)]
    job.send_signal(signal.SIGTERM)
    shown = finish(job, tmp_path) + str(commands)
    shown += "".join(path.read_text() for path in (tmp_path / "log").rglob("*") if path.is_file())
    assert token[1] not in shown


@pytest.mark.exhaustive
def test_given_addresses_are_served_and_missing_ports_are_chosen(tmp_path: Path):
    script = 'import json, os\nprint(*json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"]["servers"]["addresses"])'
    job = run(tmp_path, script, "--servers", "localhost,127.0.0.1", "--workers", "127.0.0.1,127.0.0.1:6172")
    assert (job.returncode, len(list((tmp_path / "log" / "latest").glob("rank*.log")))) == (0, 2)
    assert len({*re.findall(r"tcp://127\.0\.0\.1:(\d+)", job.stdout)}) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_ends_its_servers(number: int, tmp_path: Path):
    job = start(tmp_path)
    os.killpg(job.pid, number)
    finish(job, tmp_path)
    assert job.returncode == 128 + number
    assert "server 1 ends\n" in (tmp_path / "log" / "latest" / "server1.log").read_text()


@pytest.mark.exhaustive
def test_servers_end_with_an_agent_that_is_killed(tmp_path: Path):
    job = start(tmp_path)
    abandoned = Path((tmp_path / "addresses0").read_text().split()[0].removeprefix("ipc://")).parent
    job.kill()
    wait_until(lambda: not any(map(is_alive, read_process_ids(tmp_path).values())))
    job.communicate()
    assert run(tmp_path, "", "--servers", "1").returncode == 0
    assert not abandoned.exists()


def test_a_failed_worker_is_the_root_cause_and_its_servers_end_in_order(tmp_path: Path):
    job = run(tmp_path, "raise ValueError('no data')", "--servers", "2", "--workers", "2")
    assert job.returncode == 1
    assert re.search(r"rankless: rank \d raised ValueError: no data", job.stderr)
    assert "server 0 ends\n" in (tmp_path / "log" / "latest" / "server0.log").read_text()
    require_nothing_left(tmp_path)


def test_a_killed_server_is_the_root_cause(tmp_path: Path):
    job = start(tmp_path)
    os.kill(read_process_ids(tmp_path)["server1"], signal.SIGKILL)
    messages = finish(job, tmp_path)
    assert job.returncode == 128 + signal.SIGKILL
    assert "rankless: server 1 was killed by signal 9 (SIGKILL)\n" in messages
    assert re.search(r"rankless: its log file is log/\S+/server1\.log; the job was ended, exit code 137\n", messages)
    summary = summary_of(tmp_path)
    assert summary.failure is not None
    assert (summary.outcome, summary.failure.rank, summary.failure.server) == ("failed", None, 1)
    assert (summary.servers, summary.workers) == (2, 2)
    assert summary.verdict == "server 1 was killed by signal 9 (SIGKILL)"


LOSES_ITS_SERVER = """
import json, os, socket
from rankless.errors import LaunchError
address = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"]["servers"]["addresses"][0]
connection = socket.socket(socket.AF_UNIX)
connection.connect(address.removeprefix("ipc://"))
with open(f"rank{os.environ['RANK']}.pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
connection.recv(1)
raise RuntimeError("no answer")
"""


@pytest.mark.exhaustive
def test_a_worker_that_fails_after_its_server_is_no_root_cause(tmp_path: Path):
    job = start(tmp_path, script=LOSES_ITS_SERVER)
    os.kill(read_process_ids(tmp_path)["server0"], signal.SIGKILL)
    messages = finish(job, tmp_path)
    assert job.returncode == 128 + signal.SIGKILL
    assert "rankless: server 0 was killed by signal 9 (SIGKILL)\n" in messages
    assert "rankless: rank" not in messages
    assert not re.findall(r"^rankless: (?!after that)rank", messages, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("code", "shown", "exit_code"), [(3, "3", 3), (0, "0", 1)])
def test_a_server_that_leaves_is_the_root_cause(code: int, shown: str, exit_code: int, tmp_path: Path):
    leaves = f"listener = serve()\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))\nsignal.pause()\n"
    job = start(tmp_path, server=SERVER + leaves)
    os.kill(read_process_ids(tmp_path)["server0"], signal.SIGUSR1)
    messages = finish(job, tmp_path)
    assert job.returncode == exit_code
    assert f"rankless: server 0 ended with exit code {shown} while workers ran\n" in messages


def test_a_server_that_cannot_start_ends_the_run_before_any_worker(tmp_path: Path):
    server = SERVER + 'if index == 1:\n    raise RuntimeError("no memory for rows")\n' + SERVE.removeprefix(SERVER)
    job = run(tmp_path, "open('started', 'w').close()", "--servers", "2", "--workers", "1", server=server)
    assert job.returncode == 2
    assert "expected: server 1 to serve at ipc:///" in job.stderr
    assert "found:    it ended with exit code 1 before that. The end of its log:\n" in job.stderr
    assert "    RuntimeError: no memory for rows\n" in job.stderr
    assert re.search(r"fix:      correct what its log file names: log/\S+/server1\.log\n", job.stderr)
    assert not (tmp_path / "started").exists()
    assert summary_of(tmp_path).outcome == "failed"
    require_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ("while True:\n    signal.pause()\n", "it has not been ready for 0.5 s, and it wrote nothing into its log"),
        ("os.close(config['ready_descriptor'])\nsignal.pause()\n", "it closed its pipe without that line"),
        ("os.kill(os.getpid(), signal.SIGKILL)\n", "it was killed by signal 9"),
        ("os.write(config['ready_descriptor'], b'hello')\nsys.exit(5)\n", "it ended with exit code 5 before that"),
    ],
)
def test_servers_that_are_never_ready_are_named(rest: str, found: str, tmp_path: Path, monkeypatch):
    before = set(psutil.Process().children())  # servers of other tests
    monkeypatch.setattr(processes, "START_SECONDS", 0.5 if "0.5" in found else processes.START_SECONDS)
    variables = install_server(tmp_path, SERVER + rest)
    job = rankless_here("run", "--servers", "1", "-c", "pass", folder=tmp_path, **variables)
    assert job.returncode == 2
    assert "expected: server 0 to serve at ipc:///" in job.stderr
    assert f"found:    {found}" in job.stderr
    assert not [each for each in set(psutil.Process().children()) - before if "RANKLESS_SERVER" in each.environ()]


def test_an_interrupt_ends_servers_that_never_become_ready(tmp_path: Path):
    (tmp_path / "script.py").write_text("")
    variables = install_server(tmp_path, SERVER + "while True:\n    signal.pause()\n")
    job = start_rankless("run", "--no-warm", "--servers", "2", "script.py", folder=tmp_path, **variables)
    wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
    os.killpg(job.pid, signal.SIGINT)
    assert "rankless: ended by SIGINT\n" in finish(job, tmp_path)
    assert job.returncode == 128 + signal.SIGINT


@pytest.mark.exhaustive
def test_a_server_that_ignores_its_end_or_is_stopped_is_killed(tmp_path: Path):
    stubborn = SERVER + "listener = serve()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()\n"
    job = start(tmp_path, server=stubborn)
    os.kill(read_process_ids(tmp_path)["server0"], signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    finish(job, tmp_path)
    assert job.returncode == 128 + signal.SIGTERM
