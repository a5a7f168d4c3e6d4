"""Runs with heterogeneous workers on several hosts: the training of one device, and Paddle's names on each host."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs.test_heterogeneous_runs import SCRIPT, read_numbers, run_plainly
from jobs.test_reading_on_cpu_workers import SCRIPT as CASES
from jobs.test_reading_on_cpu_workers import read_cases, require_same
from jobs.test_reading_on_cpu_workers import run_plainly as run_cases_plainly
from support.hosts import Hosts, some_hosts
from support.jobs import wait_until

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")

RANKLESS = (sys.executable, "-m", "rankless")
BY_HAND = ("--no-ssh", "--insecure")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with some_hosts(tmp_path_factory.mktemp("three"), ("a", "b", "c")) as found:
        yield found


def run_lines(hosts: Hosts, folder: Path, lines: Sequence[Sequence[str]], *script: str) -> list[str]:
    """Type a line on host a, and perhaps others on b and c. Returns what they write."""
    jobs = [
        hosts.start(name, [*RANKLESS, *line, *script], cwd=folder) for name, line in zip("abc", lines, strict=False)
    ]
    texts = [job.communicate(timeout=240) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), texts
    return [out + err for out, err in texts]


LINES: dict[str, tuple[tuple[str, int, int], tuple[str, ...]]] = {
    # the case, the rows of a batch, and on how many hosts the line is typed; the line
    "hosts of their own": (
        ("read_loss", 20, 1),
        ("run", "--servers", "a,b", "--workers", "a,a,b", "--heter-workers", "c,c"),
    ),
    "shared hosts": (
        ("return_scores", 7, 1),
        ("run", "--servers", "a", "--workers", "a,b,b", "--heter-workers", "a,b,c"),
    ),
    "one worker on each host": (
        ("look_up_later", 20, 1),
        ("run", "--workers", "a,b", "--heter-workers", "c"),
    ),
    "numbers of each host": (
        ("mean_error", 1, 3),
        ("run", *BY_HAND, "--hosts", "a:2,b:1,c:1", "--heter-workers", "1", "--servers", "2"),
    ),
    "a host of servers": (
        ("ignore_some", 20, 1),
        ("run", "--servers", "c:6170,c", "--workers", "a,a", "--heter-workers", "b,b"),
    ),
    "gloo": (
        ("look_up_all", 20, 1),
        ("run", "--backend", "gloo", "--servers", "a", "--workers", "a,b", "--heter-workers", "a,b"),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LINES)
def test_workers_of_two_kinds_on_hosts_train_as_one_device(name: str, hosts: Hosts, tmp_path: Path):
    (case, rows, copies), line = LINES[name]
    script = (str(SCRIPT), case, "--rows", str(rows))
    wanted = read_numbers(run_plainly(*script))
    first, *_ = run_lines(hosts, tmp_path, [line] * copies, *script)
    assert len(wanted) > 180
    assert read_numbers(first) == pytest.approx(wanted, rel=1e-11, abs=1e-11)


FLEETRUN = ("fleetrun", "--insecure", "--servers=a:6170,b", "--workers=a,b:6175", "--heter_workers=b,c:6190")


@pytest.mark.exhaustive
def test_paddles_line_on_three_hosts_trains_as_one_device_with_its_names(hosts: Hosts, tmp_path: Path):
    script = (str(SCRIPT), "read_loss", "--rows", "20")
    wanted = read_numbers(run_plainly(*script))
    first, second, third = run_lines(hosts, tmp_path, [FLEETRUN] * 3, *script)
    assert read_numbers(first) == pytest.approx(wanted, rel=1e-11, abs=1e-11)
    logs = {path.name for path in (tmp_path / "log").iterdir() if path.name.partition(".")[2].isdigit()}
    assert logs == {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1", "heterlog.0", "heterlog.1"}
    assert "logs: log/workerlog.0 (in" in first
    assert "logs: log/workerlog.1, log/heterlog.0 (in" in second
    assert "logs: log/heterlog.1 (in" in third
    roles = [re.search(r"TRAINING_ROLE +(\w+)", text) for text in (first, second, third)]
    assert [role and role[1] for role in roles] == ["TRAINER", "TRAINER", "HETER_TRAINER"]
    listed = r"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST +b:6070 *\|\s+\| +c:6190 "
    assert all(re.search(listed, text) for text in (first, second, third)), first


WAITING = """
import json, os, pathlib, signal, time
import torch, rankless

folder, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
layer = torch.nn.Linear(3, 3)
model = torch.nn.Sequential(layer, rankless.parameter_server.mark_dense(torch.nn.Linear(3, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(numbers):
    return model(numbers).square().mean()

for step in range(50):
    train(torch.ones(8, 3))
    if step == 2:
        (folder / f"reached{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        if rank == "2":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_status_and_the_message_about_a_killed_worker_name_its_host(hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(WAITING)
    job = hosts.start("a", [*RANKLESS, "run", "--workers", "a,b", "--heter-workers", "c", "script.py"], cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("reached*"))) == 3 or job.poll() is not None)
    pages = {name: hosts.run(name, [*RANKLESS, "status"], cwd=tmp_path).stdout for name in "ac"}
    (tmp_path / "go").touch()
    _, err = job.communicate(timeout=240)
    assert job.returncode == 137, err
    assert re.search(r"2 workers and 1 heterogeneous worker \(rank 2\) on 3 hosts", err), err
    assert re.search(r"rank 2 on c was killed by signal 9", err), err
    assert re.search(r"^ +2 +c ", err, re.MULTILINE), err
    assert "rank 1 is on b: " in pages["a"]
    assert "rank 2 is on c: " in pages["a"]
    assert re.search(r"^ +2 +\d+ ", pages["c"], re.MULTILINE), pages["c"]


@pytest.mark.exhaustive
def test_hosts_that_name_other_heterogeneous_workers_do_not_start(hosts: Hosts, tmp_path: Path):
    options = ("run", *BY_HAND, "--hosts", "a:2,b:2,c:1", "--heter-workers")
    (tmp_path / "script.py").write_text(WAITING)
    jobs = [
        hosts.start(name, [*RANKLESS, *options, count, "script.py"], cwd=tmp_path)
        for name, count in zip("abc", "112", strict=True)
    ]
    texts = [job.communicate(timeout=120)[1] for job in jobs]
    assert 0 not in [job.returncode for job in jobs]
    assert "a:3 (1 heterogeneous), b:3 (1 heterogeneous), c:2 (1 heterogeneous)" in texts[0]
    assert not list(tmp_path.glob("reached*"))


@pytest.mark.exhaustive
def test_verify_compares_a_run_with_workers_of_two_kinds_on_hosts(hosts: Hosts, tmp_path: Path):
    line = ("verify", "--servers", "a", "--workers", "a,b", "--heter-workers", "b,c")
    (text,) = run_lines(hosts, tmp_path, [line], str(SCRIPT), "mean_error")
    assert "same training: " in text


@pytest.mark.exhaustive
def test_workers_on_other_hosts_read_nothing(hosts: Hosts, tmp_path: Path):
    cases = ("--cases", "odd_batches,use_outside_jobs,drawing_in_collation,look_up")
    wanted = run_cases_plainly(tmp_path, *cases)
    line = ("run", "--servers", "a", "--workers", "a,b", "--heter-workers", "b,c")
    run_lines(hosts, tmp_path, [line], str(CASES), str(tmp_path), *cases)
    for rank in range(4):
        found = read_cases(tmp_path, rank)
        require_same(found, wanted, rank)
        assert all((line["reads"] > 0) == (rank < 2) for line in found.values())
