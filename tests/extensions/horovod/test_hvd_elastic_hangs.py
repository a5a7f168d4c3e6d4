"""A worker of an elastic job hangs: it is named, ended and replaced, and the training continues."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from extensions.horovod.test_hvd_elastic_jobs import (
    SCRIPT,
    assert_every_sample_was_seen,
    lines,
    results,
    steps_by_process,
    wait_for_size,
)
from support.jobs import is_alive, kill_job, start_rankless, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

HANGS = """
        if len(sys.argv) > 3 and state.steps == 12 and hvd.rank() == int(sys.argv[3]) and not os.path.exists("hung"):
            open("hung", "w").write(str(os.getpid()))
            fetch()
"""


FETCH = """
class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        open("reader", "w").write(str(os.getpid()))
        time.sleep(10**6)


def fetch():
    if sys.argv[4] == "sleeps":
        time.sleep(10**6)
    else:
        next(iter(DataLoader(Endless(), num_workers=1)))


@hvd.elastic.run"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = SCRIPT.read_text().replace(
        "            state.save()\n", "            state.save()\n" + HANGS.replace("\n  ", "\n      ")
    )
    text = text.replace("@hvd.elastic.run", FETCH)
    (tmp_path / "train.py").write_text(text)
    return tmp_path


def command(*arguments: str, epochs: int) -> list[str]:
    return ["horovodrun", "-np", "3", "--min-np", "2", sys.executable, "train.py", str(epochs), "0.1", *arguments]


def test_a_worker_that_is_stopped_is_ended_after_the_stall_time_and_replaced(folder: Path):
    job = start_rankless(*command(epochs=20), folder=folder, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="11")
    try:
        wait_for_size(folder, 3)
        first = set(steps_by_process(folder))
        lead = next(number for number, words in lines(folder, "began") if words[0] == "0")
        os.kill(lead, signal.SIGSTOP)
        wait_until(lambda: {number for number, words in lines(folder, "began") if words[1] == "3"} > first)
        out, err = job.communicate(timeout=120)
    finally:
        kill_job(job)
    assert job.returncode == 0, out + err
    assert_every_sample_was_seen(folder, epochs=20)
    assert re.search(
        r"worker 0 \(rank 0 of round 1, localhost\) did not arrive while ranks 1, 2 wait in .*: it is stopped", err
    )


@pytest.mark.parametrize(("rank", "how"), [("0", "sleeps"), ("2", "reads")])
def test_a_worker_that_hangs_in_its_own_code_is_ended_and_replaced(rank: str, how: str, folder: Path):
    stall = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    job = start_rankless(*command(rank, how, epochs=40), folder=folder, **stall)
    try:
        out, err = job.communicate(timeout=120)
    finally:
        kill_job(job)
    assert job.returncode == 0, out + err
    assert len(results(out)) == 1
    assert_every_sample_was_seen(folder, epochs=40)
    assert len({number for number, _ in lines(folder, "began")}) == 4
    assert re.search(r"round 2 waits for worker \d \(localhost\) to call hvd.init, 5 s", err)
    assert re.search(
        r"did not call hvd.init again for 3\d s: it is in fetch\(\) at train.py:\d+.*; it was killed", err
    ), err
    assert (folder / "reader").exists() == (how == "reads")
    assert how == "sleeps" or not is_alive(int((folder / "reader").read_text()))
    assert "has made no progress" not in err, "who waits for a round is in none"


def test_a_worker_that_ends_too_late_is_named_and_the_job_fails_after_the_stall_time(folder: Path):
    text = (folder / "train.py").read_text()
    last = "\nif hvd.rank() == 1:\n    time.sleep(10**6)\n"
    (folder / "train.py").write_text(text + last)
    job = start_rankless(*command(epochs=2), folder=folder, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="12")
    try:
        _, err = job.communicate(timeout=120)
    finally:
        kill_job(job)
    assert job.returncode == 1, err
    assert re.search(
        r"round 1 has made no progress for 1\d s: ranks 0, 2 ended\n +rank 1, worker \d on localhost: ", err
    )
    assert re.search(r"did not finish for 1\d s, and others have: it is at train.py:\d+.*; it was killed", err)
