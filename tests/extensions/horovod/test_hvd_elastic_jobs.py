"""Elastic jobs as users start them: the training continues when workers are killed and hosts change."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.jobs import is_alive, kill_job, rankless, start_rankless, wait_until

SCRIPT = Path(__file__).with_name("elastic_digits.py")
EXAMPLE = SCRIPT.parents[2] / "examples" / "horovod" / "elastic.py"
SAMPLES = set(range(600))
SECONDS = 120.0


@dataclass(frozen=True)
class Done:
    """A batch that was saved."""

    steps: int
    epoch: int
    size: int
    samples: tuple[int, ...]
    process_id: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    return tmp_path


def lines(folder: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """What every process has written down under a name, whole lines only."""
    for path in folder.glob(f"{name}.*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield int(path.suffix[1:]), line.split()


def done(folder: Path) -> list[Done]:
    return [
        Done(int(words[0]), int(words[1]), int(words[2]), tuple(map(int, words[3].split(","))), process_id)
        for process_id, words in lines(folder, "done")
    ]


def steps_by_process(folder: Path) -> dict[int, int]:
    """How far each living worker has come."""
    found: dict[int, int] = {}
    for each in done(folder):
        if is_alive(each.process_id):
            found[each.process_id] = max(each.steps, found.get(each.process_id, 0))
    return found


def wait_for_size(folder: Path, size: int) -> int:
    """Wait until a batch is saved in a world of this size; the number of its step."""
    wait_until(lambda: any(each.size == size for each in done(folder)), seconds=SECONDS)
    return max(each.steps for each in done(folder) if each.size == size)


def wait_until_three_are_past(folder: Path, steps: int) -> None:
    wait_until(lambda: sum(own > steps for own in steps_by_process(folder).values()) == 3, seconds=SECONDS)


def command(*options: str, epochs: int, pause: float = 0.02) -> list[str]:
    return ["horovodrun", *options, sys.executable, "train.py", str(epochs), str(pause)]


def results(text: str) -> set[tuple[str, ...]]:
    """What each rank that came to the end has got."""
    return set(re.findall(r"<stdout>:end (\d+) (\S+) (\S+)", text))


def assert_every_sample_was_seen(folder: Path, *, epochs: int) -> None:
    """In each epoch; and a step that was done twice, for a worker was killed in it, was done on the same samples."""
    batches: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
    seen: dict[int, set[int]] = {}
    for each in done(folder):
        batches.setdefault(each.steps, set()).add((each.epoch, tuple(sorted(each.samples))))
        seen.setdefault(each.epoch, set()).update(each.samples)
    assert sorted(batches) == list(range(1, len(batches) + 1))
    assert seen == dict.fromkeys(range(epochs), SAMPLES)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_with_repeatedly_killed_workers_ends_as_one_without_failures(folder: Path, tmp_path: Path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(SCRIPT, alone / "train.py")
    epochs, kills = 10, 5
    undisturbed = start_rankless(*command("-np", "3", epochs=epochs, pause=0.0), folder=alone)
    expected, output = undisturbed.communicate(timeout=SECONDS)
    assert undisturbed.returncode == 0, output
    job = start_rankless(*command("-np", "3", "--min-np", "2", epochs=epochs, pause=0.1), folder=folder)
    killed: list[int] = []
    try:
        for number in range(kills):
            # All three, a replacement too, have got further: now one of them is killed, rank 0 too.
            wait_until_three_are_past(folder, max(steps_by_process(folder).values(), default=0))
            killed_worker = sorted(steps_by_process(folder))[number % 3]
            os.kill(killed_worker, signal.SIGKILL)
            killed.append(killed_worker)
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 0, out + err
    assert results(out) == results(expected)
    (steps, accuracy, _) = results(out).pop()
    assert int(steps) == epochs * 8
    assert float(accuracy) > 0.9
    assert_every_sample_was_seen(folder, epochs=epochs)
    processes = {process_id for process_id, _ in lines(folder, "began")}
    assert len(processes) == 3 + kills, "who was not killed kept its process, and who was got one replacement"
    assert len(re.findall(r"was killed by signal 9", err)) == kills


@pytest.mark.slow
@pytest.mark.exhaustive
def test_hosts_are_added_and_removed_while_the_job_runs(folder: Path):
    discovery = folder / "discover.sh"
    discovery.write_text("#!/bin/sh\ncat hosts\n")
    discovery.chmod(0o755)

    def hosts_are(*hosts: str) -> None:
        (folder / "hosts.new").write_text("\n".join(hosts) + "\n")
        (folder / "hosts.new").rename(folder / "hosts")

    hosts_are("localhost:1", "127.0.0.1:1")
    epochs = 30
    options = ("-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", "./discover.sh")
    job = start_rankless(*command(*options, epochs=epochs, pause=0.1), folder=folder)
    try:
        wait_for_size(folder, 2)
        first = set(steps_by_process(folder))
        hosts_are("localhost:1", "127.0.0.1:1", "127.0.0.2:4")
        wait_for_size(folder, 3)  # not more than --max-np
        wait_until(lambda: first < set(steps_by_process(folder)), seconds=SECONDS)
        hosts_are("127.0.0.2:1")
        wait_for_size(folder, 1)
        wait_until(lambda: not any(map(is_alive, first)), seconds=SECONDS)
        hosts_are("127.0.0.2:2")
        wait_until(lambda: max(done(folder), key=lambda each: each.steps).size == 2, seconds=SECONDS)
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 0, out + err
    assert "failed" not in err
    assert len(results(out)) == 1
    assert_every_sample_was_seen(folder, epochs=epochs)
    assert len({process_id for process_id, _ in lines(folder, "began")}) == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_too_few_workers_for_too_long_end_the_job_and_leave_nothing(folder: Path):
    discovery = folder / "discover.sh"
    discovery.write_text("#!/bin/sh\ncat hosts\n")
    discovery.chmod(0o755)
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "2", "--host-discovery-script", "./discover.sh")
    job = start_rankless(*command(*options, epochs=1000), folder=folder)
    try:
        wait_for_size(folder, 2)
        processes = set(steps_by_process(folder))
        (folder / "hosts").write_text("localhost:1\n")
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 1, out + err
    assert "there are 1 workers, and 2 are needed (--min-np); none joined in 2 s (--elastic-timeout)" in err
    assert not any(map(is_alive, processes))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_reset_limit_ends_the_job_with_the_worker_that_failed_last(folder: Path):
    job = start_rankless(*command("-np", "2", "--min-np", "1", "--reset-limit", "0", epochs=1000), folder=folder)
    try:
        wait_for_size(folder, 2)
        processes = set(steps_by_process(folder))
        os.kill(max(processes), signal.SIGKILL)
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 128 + signal.SIGKILL, out + err
    assert "the reset limit of 0 has been reached" in err
    assert "was killed by signal 9 (SIGKILL)" in err
    assert not any(map(is_alive, processes))


@pytest.mark.slow
def test_a_script_that_always_fails_is_not_restarted_forever(folder: Path):
    (folder / "train.py").write_text("import horovod.torch as hvd\nhvd.init()\nraise KeyError('mine')\n")
    ended = rankless(*command("-np", "2", "--min-np", "1", epochs=1), folder=folder)
    assert ended.returncode == 1
    assert "host localhost is blacklisted permanently" in ended.stderr
    assert "raised KeyError: 'mine'" in ended.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_last_of_all_workers_may_fail_too(folder: Path):
    with (folder / "train.py").open("a") as script:
        script.write("if hvd.rank() == 1:\n    time.sleep(5)\n    raise KeyError('mine')\n")
    ended = rankless(*command("-np", "2", "--min-np", "1", epochs=1), folder=folder)
    assert ended.returncode == 1
    assert "raised KeyError: 'mine'" in ended.stderr
    assert "failed while the others finished" in ended.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_elastic_job_ends_at_ctrl_c_and_leaves_nothing(folder: Path):
    job = start_rankless(*command("-np", "2", "--min-np", "1", epochs=1000), folder=folder)
    try:
        wait_for_size(folder, 2)
        processes = set(steps_by_process(folder))
        os.kill(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 128 + signal.SIGINT
    assert "ended by SIGINT" in err
    assert not any(map(is_alive, processes))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_host_that_the_others_wait_for_gets_the_state_from_them(folder: Path):
    # Horovod's issue 3494: who had seen a host go did not send the state, who came waited for it, both for ever.
    discovery = folder / "discover.sh"
    discovery.write_text("#!/bin/sh\ncat hosts\n")
    discovery.chmod(0o755)
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    options = ("-np", "2", "--min-np", "2", "--host-discovery-script", "./discover.sh")
    job = start_rankless(*command(*options, epochs=12, pause=0.1), folder=folder)
    try:
        wait_for_size(folder, 2)
        first = set(steps_by_process(folder))
        (folder / "hosts").write_text("localhost:1\n")
        wait_until(lambda: sum(map(is_alive, first)) == 1, seconds=SECONDS)
        steps = max(each.steps for each in done(folder))
        (folder / "hosts").write_text("localhost:1\n127.0.0.2:1\n")
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 0, out + err
    assert len(results(out)) == 1
    assert {words[2] for process_id, words in lines(folder, "began") if process_id not in first} == {str(steps)}
    assert_every_sample_was_seen(folder, epochs=12)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_continues_when_a_worker_is_killed(tmp_path: Path):
    options = ("horovodrun", "-np", "2", "--min-np", "1", sys.executable, str(EXAMPLE), "--epochs", "8")
    job = start_rankless(*options, folder=tmp_path, OMP_NUM_THREADS="1")
    try:
        assert job.stdout is not None
        seen = [next(line for line in job.stdout if "epoch 1" in line)]
        tree = psutil.Process(job.pid).children(recursive=True)
        parents = {process.ppid() for process in tree}
        os.kill(max(process.pid for process in tree if process.pid not in parents), signal.SIGKILL)
        out, err = job.communicate(timeout=SECONDS)
    finally:
        kill_job(job)
    assert job.returncode == 0, "".join(seen) + out + err
    assert "was killed by signal 9" in err
    assert "training with 2 workers from epoch" in out
    (accuracy,) = re.findall(r"accuracy ([\d.]+) on 2 workers", out)
    assert float(accuracy) > 0.85


VARIABLES = """
import os
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
assert all(os.environ[f"HOROVOD_{name}"].isdigit() for name in NAMES)
import horovod.torch as hvd
for _ in range(2):
    hvd.init()
    expected = [getattr(hvd, name.lower())() for name in NAMES]
    assert [int(os.environ[f"HOROVOD_{name}"]) for name in NAMES] == expected
    hvd.barrier()
print("equal", flush=True)
"""


@pytest.mark.exhaustive  # `elastic_digits.py` looks at them, too
def test_elastic_workers_have_horovods_variables(tmp_path: Path):
    (tmp_path / "script.py").write_text(VARIABLES)
    job = rankless("horovodrun", "-np", "2", "--min-np", "1", sys.executable, "script.py", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("equal") == 2
