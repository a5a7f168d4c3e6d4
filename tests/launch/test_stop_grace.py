"""A signal to the agent from outside: workers have time to save, and the terminal names those that were cut off."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import RANKLESS, is_alive, kill_job, read_process_ids, start_rankless, start_script, wait_until

from rankless.config.cluster_variables import choose_grace, read_kill_wait
from rankless.errors import ConfigError
from rankless.records.run_json_format import decode_run_summary

pytestmark = pytest.mark.slow

SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def mark(name):
    open(name + rank + ".txt", "w").close()
def save(number, frame):
    mark("saving")
    while not os.path.exists("finish"):
        time.sleep(0.01)
    mark("saved")
    sys.exit(85)
signal.signal(getattr(signal, os.environ.get("SAVE_ON", "SIGTERM")), save)
with open(f"worker{rank}.pid", "w") as file:
    print(os.getpid(), file=file)
while True:
    time.sleep(0.01)
"""
FLAGS = """
import os, signal, time
rank = os.environ["RANK"]
seen = []
for name in ("SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, _frame: seen.append(signal.Signals(number).name))
with open(f"worker{rank}.pid", "w") as file:
    print(os.getpid(), file=file)
while len(seen) < 2:
    time.sleep(0.01)
print("rank", rank, "saw", *seen)
"""


def names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("sav*.txt")}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)]
)
def test_a_save_in_a_signal_handler_has_its_time_and_is_not_cut(number: signal.Signals, code: int, tmp_path: Path):
    job = start_script(SAVES, "-n", "2", folder=tmp_path, SAVE_ON=number.name)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(number)
        _, text = wait_for_notice(job, "a second signal to this process ends them at once")
        assert names(tmp_path) == {"saving0", "saving1"}
        (tmp_path / "finish").touch()
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == code
    assert names(tmp_path) == {"saving0", "saving1", "saved0", "saved1"}
    assert "killed" not in text + err
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert [rank.exit_code for rank in summary.ranks] == [85, 85]
    assert [rank.cut for rank in summary.ranks] == [None, None]


def wait_for_notice(job, words: str) -> tuple[str, str]:
    text = ""
    for line in job.stderr:
        text += line
        if words in line:
            return line, text
    raise AssertionError(text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ends_by", ["the grace", "a second signal"])
def test_workers_that_are_cut_off_are_named_with_what_they_did(ends_by: str, tmp_path: Path):
    options = ["--grace-seconds", "1.5"] if ends_by == "the grace" else []
    job = start_script(SAVES, "-n", "2", *options, folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGTERM)
        wait_until(lambda: names(tmp_path) == {"saving0", "saving1"})
        if not options:
            wait_until(lambda: repeated(job, tmp_path))
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == 143
    assert names(tmp_path) == {"saving0", "saving1"}
    for rank in range(2):
        (line,) = [line for line in err.splitlines() if line.startswith(f"rankless: rank {rank} had not ended ")]
        assert "after the signal, and was killed" in line
        assert "save() at script.py:" in line or not options
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert all(rank.cut is not None for rank in summary.ranks)
    assert (summary.outcome, summary.exit_code) == ("interrupted", 143)


def repeated(job, folder: Path) -> bool:
    job.send_signal(signal.SIGTERM)  # one that comes at once belongs to the first
    return not any(is_alive(number) for number in read_process_ids(folder).values())


@pytest.mark.exhaustive
def test_signals_for_the_script_reach_it_and_nothing_else_happens(tmp_path: Path):
    job = start_script(FLAGS, "-n", "2", "--show", "all", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGUSR1)
        job.send_signal(signal.SIGUSR2)
        out, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == 0, err
    # Two signals that wait for a process arrive in any order.
    words = sorted(line.split() for line in out.splitlines())
    assert [(line[2], set(line[4:])) for line in words] == [
        ("0", {"SIGUSR1", "SIGUSR2"}),
        ("1", {"SIGUSR1", "SIGUSR2"}),
    ]


@pytest.mark.exhaustive
def test_a_script_without_a_handler_ends_by_the_signal(tmp_path: Path):
    job = start_script(SAVES, "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == 128 + signal.SIGUSR1
    assert "was killed by signal 10 (SIGUSR1)" in err


LEAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    if rank == "0":
        time.sleep(3)
        open("saved0.txt", "w").close()
    sys.exit(85)
signal.signal(signal.SIGUSR1, save)
with open(f"worker{rank}.pid", "w") as file:
    print(os.getpid(), file=file)
while True:
    time.sleep(0.01)
"""


@pytest.mark.exhaustive
def test_a_rank_that_leaves_after_a_signal_for_the_script_does_not_cut_a_save(tmp_path: Path):
    job = start_script(LEAVES, "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == 85
    assert names(tmp_path) == {"saved0"}, err


@pytest.mark.exhaustive
def test_horovods_workers_have_five_seconds(tmp_path: Path):
    (tmp_path / "script.py").write_text(SAVES.replace('"RANK"', '"HOROVOD_RANK"'))
    job = start_rankless("horovodrun", "-np", "2", "python", "script.py", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert "had not ended 5.0 s after the signal" in err
    assert names(tmp_path) == {"saving0", "saving1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", [pytest.param("a", marks=pytest.mark.exhaustive), "b"])
def test_workers_of_all_hosts_save_whichever_agent_gets_the_signal(stopped: str, hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(SAVES)
    listed = ",".join(f"{address}:1" for address in hosts.addresses)
    line = [*RANKLESS, "run", "--hosts", listed, "--no-ssh", "--insecure", "script.py"]
    jobs = {name: hosts.start(name, line, cwd=tmp_path) for name in ("a", "b")}
    wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
    jobs[stopped].send_signal(signal.SIGTERM)
    wait_until(lambda: names(tmp_path) == {"saving0", "saving1"})
    (tmp_path / "finish").touch()
    reports = [job.communicate(timeout=60)[1] for job in jobs.values()]
    assert names(tmp_path) == {"saving0", "saving1", "saved0", "saved1"}, "\n".join(reports)
    assert not any("killed" in report for report in reports)
    assert not any(is_alive(number) for number in read_process_ids(tmp_path).values())


def test_the_grace_fits_into_what_a_cluster_manager_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert choose_grace(None, {}) == 30
    assert choose_grace(7.5, {"SLURM_JOB_ID": "7"}) == 7.5
    assert choose_grace(None, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) == 25
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_kill_wait() == 30
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'KillOnBadExit           = 0'\necho 'KillWait                = 90 sec'\n")
    scontrol.chmod(0o755)
    assert choose_grace(None, {"SLURM_JOB_ID": "7"}) == 85
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--grace-seconds"):
            choose_grace(wrong, {})
