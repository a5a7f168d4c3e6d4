"""Servers that die and keep their tables: the agent starts them again, and the run continues."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.jobs import rankless, wait_until
from support.server_jobs import require_nothing_left, run, summary_of
from support.servers import ASK, DURABLE, SERVER, install_server

from rankless.extensions.servers.config import ServerConfig
from rankless.extensions.servers.launch import server_process
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_process import ServerLaunch
from rankless.launch.signal_reader import Interrupts
from rankless.records.events import NO_RANK, ProcessExited, ProcessRestarted

pytestmark = pytest.mark.slow

NOTICE = r"rankless: server {} {}; started again in \d[\d.]* m?s{}\n"


def notices(text: str, server: int, how: str = "was killed by SIGKILL", more: str = "") -> int:
    """Return how many lines about this restart a text has."""
    return len(re.findall("^" + NOTICE.format(server, how, more), text, re.MULTILINE))


def log_of(folder: Path, server: int) -> str:
    return (folder / "log" / "latest" / f"server{server}.log").read_text()


KILLED_ONCE = (
    ASK
    + """
def memories(process_id):
    paths = [f"/proc/{process_id}/fd/{number}" for number in os.listdir(f"/proc/{process_id}/fd")]
    names = [os.readlink(path) for path in paths if os.path.lexists(path)]
    return [name.split()[0].removeprefix("/memfd:") for name in names if name.startswith("/memfd:rankless-server")]

first = ask(1)
second = ask(1, kill(1))
print(*first[:2], *second[:2], first[2] != second[2], ask(0)[:2])
print(memories("self"), memories(os.getppid()), memories(second[2]), memories(ask(0)[2]))
"""
)
ADDRESSES = {"ipc": "2", "tcp": "127.0.0.1,localhost"}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("transport", ADDRESSES)
def test_a_killed_server_starts_again_with_its_memory(transport: str, tmp_path: Path):
    job = run(tmp_path, KILLED_ONCE, "--servers", ADDRESSES[transport], "--workers", "1", server=DURABLE)
    counts, memories = job.stdout.splitlines()
    assert (job.returncode, counts) == (0, "0 1 1 2 True [0, 1]")
    assert memories == "[] [] ['rankless-server-1'] ['rankless-server-0']"
    assert (notices(job.stderr, 1), notices(job.stderr, 0)) == (1, 0)
    log = re.sub(r"again in .*", "again", log_of(tmp_path, 1))
    restarted = "rankless: server 1 was killed by SIGKILL; started again\n"
    assert log == f"server 1 serves\nserver 1 serves\n{restarted}server 1 ends\n"
    assert log_of(tmp_path, 0) == "server 0 serves\nserver 0 ends\n"
    summary = summary_of(tmp_path)
    assert (summary.outcome, summary.servers, summary.server_restarts) == ("succeeded", 2, (0, 1))
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
def test_servers_may_be_killed_again_and_again(tmp_path: Path):
    script = ASK + "for _ in range(5):\n    incarnation = kill(0)\n    last = ask(0, incarnation)\nprint(*last[:2])\n"
    job = run(tmp_path, script, "--servers", "1", "--workers", "1", server=DURABLE)
    assert (job.returncode, job.stdout) == (0, "5 6\n")
    assert (notices(job.stderr, 0), notices(log_of(tmp_path, 0), 0)) == (5, 5)
    assert summary_of(tmp_path).server_restarts == (5,)
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_while_it_starts_again_starts_once_more(tmp_path: Path):
    server = SERVER + "if config['incarnation'] == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nanswer()\n"
    script = ASK + "kill(1)\nprint(*ask(1, 2)[:2])\n"
    job = run(tmp_path, script, "--servers", "2", "--workers", "1", server=server)
    assert (job.returncode, job.stdout) == (0, "2 2\n")
    assert notices(job.stderr, 1, more=", at attempt 2") == 1
    assert summary_of(tmp_path).server_restarts == (0, 2)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("code", "restarts"), [(5, 1), (3, 0), (0, 0)])
def test_the_exit_code_decides_whether_a_server_starts_again(code: int, restarts: int, tmp_path: Path):
    server = SERVER + f"signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))\nanswer()\n"
    script = ASK + "print(*ask(0, kill(0, signal.SIGUSR1))[:2])\n"
    job = run(tmp_path, script, "--servers", "1", "--workers", "1", server=server)
    assert summary_of(tmp_path).server_restarts == (restarts,)
    if restarts:
        assert (job.returncode, job.stdout) == (0, "1 2\n")
        assert notices(job.stderr, 0, "ended with exit code 5") == 1
    else:
        assert job.returncode == (code or 1)
        assert f"rankless: server 0 ended with exit code {code} while workers ran\n" in job.stderr
    require_nothing_left(tmp_path)


def test_a_server_that_is_killed_by_the_last_line_is_no_failure(tmp_path: Path):
    job = run(tmp_path, ASK + "kill(0)\n", "--servers", "1", "--workers", "1", server=DURABLE)
    assert (job.returncode, summary_of(tmp_path).outcome) == (0, "succeeded")
    require_nothing_left(tmp_path)


@pytest.mark.exhaustive
def test_fleetrun_starts_servers_again_and_appends_to_their_logs(tmp_path: Path):
    (tmp_path / "script.py").write_text(ASK + "print(*ask(0, kill(0))[:2])\n")
    options = ("--server_num=1", "--worker_num=1", "--log_dir=logs")
    job = rankless("fleetrun", *options, "script.py", folder=tmp_path, **install_server(tmp_path, DURABLE))
    assert job.returncode == 0
    assert "1 2\n" in (tmp_path / "logs" / "workerlog.0").read_text()
    log = (tmp_path / "logs" / "serverlog.0").read_text()
    assert (log.count("server 0 serves\n"), notices(log, 0), notices(job.stderr, 0)) == (2, 1, 1)
    require_nothing_left(tmp_path)


TRAINING = """
import torch, rankless

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return {"loss": model(inputs).square().mean()}

for batch in rankless.loader(torch.utils.data.TensorDataset(torch.randn(12, 2)), batch_size=6):
    train(*batch)
if addresses:
    ask(0, kill(0) if os.environ["RANK"] == "0" else 1)
"""


@pytest.mark.exhaustive
def test_verify_goes_on_after_the_death_of_a_server(tmp_path: Path):
    (tmp_path / "script.py").write_text(ASK + TRAINING)
    options = ("verify", "--servers", "1", "--workers", "2", "--devices", "cpu", "--show", "script.py")
    done = rankless(*options, folder=tmp_path, **install_server(tmp_path, DURABLE))
    assert done.returncode == 0
    assert notices(done.stderr, 0) == 1


def launches(folder: Path, server: str) -> list[ServerLaunch]:
    config = ServerConfig(
        index=0, server_count=1, worker_count=1, address=f"ipc://{folder}/0", token="t" * 64, run_id="run"
    )
    variables = install_server(folder, server)
    return [ServerLaunch(config=config, variables=variables, log_file=str(folder / "server0.log"))]


class Polled:
    """Servers within this process, and their records."""

    def __init__(self, folder: Path, server: str = DURABLE, *, max_restarts: int = 10) -> None:
        self.servers = ServerProcesses(launches(folder, server), max_restarts=max_restarts)
        self.records: list[ProcessExited | ProcessRestarted] = []
        with Interrupts() as interrupts:
            self.servers.start(interrupts)

    def kill(self) -> None:
        os.kill(self.servers.list_rows()[0].process_id, signal.SIGKILL)

    def wait_for(self, kind: type) -> None:
        def has_come() -> bool:
            self.records += self.servers.poll()
            return any(isinstance(record, kind) for record in self.records)

        wait_until(has_come)


@pytest.fixture
def server_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_restart_leaves_no_descriptor_and_no_process(server_folder: Path):
    before = os.listdir("/proc/self/fd")
    polled = Polled(server_folder)
    try:
        first = polled.servers.list_rows()[0].process_id
        polled.kill()
        polled.wait_for(ProcessExited)
        (row,) = polled.servers.list_rows()
        assert (row.is_restarting, row.process_id != first) == (True, True)
        polled.wait_for(ProcessRestarted)
        assert not polled.servers.list_rows()[0].is_restarting
        assert polled.servers.list_process_ids() == {row.process_id}
    finally:
        polled.servers.close()
    assert [type(record) for record in polled.records] == [ProcessExited, ProcessRestarted]
    assert os.listdir("/proc/self/fd") == before
    require_nothing_left(server_folder)


def test_a_system_without_files_in_memory_starts_no_server_again(server_folder: Path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    polled = Polled(server_folder, SERVER + "assert config['memory_descriptor'] is None\nserve()\nsignal.pause()\n")
    try:
        polled.kill()
        polled.wait_for(ProcessExited)
    finally:
        polled.servers.close()
    (record,) = polled.records
    assert record == ProcessExited(
        rank=NO_RANK, time_ns=record.time_ns, role="server", number=0, exit_code=-signal.SIGKILL
    )


def test_a_server_that_the_system_cannot_start_again_has_ended(server_folder: Path, monkeypatch):
    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    polled = Polled(server_folder)
    try:
        monkeypatch.setattr(server_process.subprocess, "Popen", refuse)
        polled.kill()
        polled.wait_for(ProcessExited)
        assert not polled.servers.poll()
        assert not polled.servers.list_rows()[0].is_restarting
    finally:
        polled.servers.close()
    (record,) = polled.records
    assert isinstance(record, ProcessExited)
    assert (record.is_restarted, record.exit_code) == (False, -signal.SIGKILL)
    assert record.note == ", and could not be started again: [Errno 11] Resource temporarily unavailable"
