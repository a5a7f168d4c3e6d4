"""Elastic jobs on several machines, which are added, removed and lost while the job runs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from extensions.horovod.test_hvd_elastic_jobs import (
    SCRIPT,
    assert_every_sample_was_seen,
    done,
    lines,
    results,
    wait_for_size,
)
from support.hosts import Hosts, some_hosts, two_hosts
from support.jobs import is_alive, rankless, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (made / "train.py").write_text(SCRIPT.read_text())
    (made / "discover.sh").write_text("#!/bin/sh\ncat hosts\n")
    (made / "discover.sh").chmod(0o755)
    return made


def wait_for_output(folder: Path) -> None:
    """Let the training go on until `enough` is called, however slow this machine is."""
    text = (folder / "train.py").read_text()
    more = "state.epoch < EPOCHS or not hvd.broadcast_object(os.path.exists('enough'))"
    assert "state.epoch < EPOCHS" in text
    (folder / "train.py").write_text(text.replace("state.epoch < EPOCHS", more))


def enough(folder: Path) -> None:
    (folder / "enough").touch()


def hosts_are(folder: Path, *found: str) -> None:
    (folder / "hosts.new").write_text("\n".join(found) + "\n")
    (folder / "hosts.new").rename(folder / "hosts")


def start(hosts: Hosts, folder: Path, options: Sequence[str], *, epochs: int) -> subprocess.Popen[str]:
    every = (*options, "--host-discovery-script", "./discover.sh")
    program = (sys.executable, "train.py", str(epochs), "0.1")
    return hosts.start("a", [sys.executable, "-m", "rankless", "horovodrun", *every, *program], cwd=folder)


def workers_on(hosts: Hosts, name: str, folder: Path) -> set[int]:
    """The living workers of a host."""
    return {each for each, _ in lines(folder, "began")} & hosts.processes(name)


def left(hosts: Hosts, idle: dict[str, set[int]]) -> set[str]:
    """The names of the processes that were not there before; an sshd holds on to a connection that was cut."""
    found = {number for name, before in idle.items() for number in hosts.processes(name) - before}
    names = {name_of(number) for number in found}
    return {name for name in names if name and not name.startswith("sshd")}


def name_of(process_id: int) -> str:
    try:
        return psutil.Process(process_id).name()
    except psutil.NoSuchProcess:
        return ""


def wait_for_steps(folder: Path, more: int) -> None:
    """Wait until so many further steps are done."""
    before = max(each.steps for each in done(folder))
    wait_until(lambda: max(each.steps for each in done(folder)) >= before + more)


def test_training_continues_when_an_ssh_machine_is_added_and_lost(folder: Path, tmp_path: Path):
    hosts_are(folder, "a:1")
    wait_for_output(folder)
    with two_hosts(tmp_path, sshd=("b",)) as hosts:
        job = start(hosts, folder, ("-np", "1", "--min-np", "1"), epochs=1)
        wait_for_size(folder, 1)
        hosts_are(folder, "a:1", "b:2")
        wait_for_size(folder, 3)
        there = workers_on(hosts, "b", folder)
        wait_for_steps(folder, 3)
        hosts_are(folder, "a:1")
        hosts.link("b", up=False)  # nothing tells its peers that it is gone
        wait_for_steps(folder, 4)
        enough(folder)
        out, err = job.communicate(timeout=120)
        wait_until(lambda: not any(map(is_alive, there)), seconds=30)
    assert job.returncode == 0, out + err
    assert len(results(out)) == 1
    assert_every_sample_was_seen(folder, epochs=1 + max(each.epoch for each in done(folder)))
    assert re.search(r"round 2: 3 workers, by rank: 0 \(a\), 1 \(b\), 2 \(b\)", err)
    assert "host b is lost, and with it workers 1, 2: " in err


def test_of_three_machines_one_is_added_one_removed_and_one_lost(folder: Path, tmp_path: Path):
    hosts_are(folder, "a:1", "b:1")
    wait_for_output(folder)
    with some_hosts(tmp_path, "abc", sshd="bc") as hosts:
        idle = {name: hosts.processes(name) for name in "abc"}
        job = start(hosts, folder, ("-np", "2", "--min-np", "1"), epochs=1)
        wait_for_size(folder, 2)
        first = workers_on(hosts, "a", folder)
        second = workers_on(hosts, "b", folder)
        hosts_are(folder, "a:1", "b:1", "c:2")
        wait_for_size(folder, 4)
        third = workers_on(hosts, "c", folder)
        assert (len(first), len(second), len(third)) == (1, 1, 2)
        assert workers_on(hosts, "b", folder) == second
        hosts_are(folder, "a:1", "c:2")  # b is taken away
        wait_for_size(folder, 3)
        wait_until(lambda: not any(map(is_alive, second)), seconds=30)
        wait_for_steps(folder, 2)
        assert workers_on(hosts, "c", folder) == third
        hosts.link("c", up=False)  # c is lost
        wait_for_steps(folder, 4)
        hosts_are(folder, "a:1", "b:2")  # b comes again
        wait_until(lambda: max(done(folder), key=lambda each: each.steps).size == 3)
        assert workers_on(hosts, "a", folder) == first
        enough(folder)
        out, err = job.communicate(timeout=120)
        wait_until(lambda: not left(hosts, idle), seconds=30)
    assert job.returncode == 0, out + err
    assert len(results(out)) == 1, out + err
    assert_every_sample_was_seen(folder, epochs=1 + max(each.epoch for each in done(folder)))
    assert re.search(r"host c is lost, and with it workers \d, \d: ", err)
    assert len(re.findall("is lost", err)) == 1, "at the end of the job no host is lost"
    assert "host b is lost" not in err


def test_three_machines_that_change_give_the_result_of_three_that_do_not(folder: Path, tmp_path: Path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(SCRIPT.read_text())
    epochs = 20
    expected = rankless("horovodrun", "-np", "3", sys.executable, "train.py", str(epochs), "0", folder=alone)
    assert expected.returncode == 0, expected.stderr
    hosts_are(folder, "a:1", "b:1", "c:1")
    with some_hosts(tmp_path, "abc", sshd="bc") as hosts:
        idle = {name: hosts.processes(name) for name in "abc"}
        job = start(hosts, folder, ("-np", "3", "--min-np", "3"), epochs=epochs)
        wait_for_steps_of_three(folder)
        (first,) = workers_on(hosts, "a", folder)
        (there,) = workers_on(hosts, "c", folder)
        hosts_are(folder, "a:2", "c:1")  # b is taken away, and a has room for one more
        wait_until(lambda: not workers_on(hosts, "b", folder), seconds=60)
        wait_for_steps_of_three(folder)
        assert workers_on(hosts, "c", folder) == {there}
        cut_all_ssh(hosts, "c")  # c is lost, and comes again
        wait_until(lambda: not is_alive(there), seconds=60)
        wait_for_steps_of_three(folder)
        (other,) = workers_on(hosts, "c", folder)
        os.kill(other, signal.SIGKILL)
        wait_for_steps_of_three(folder)
        assert is_alive(first)
        out, err = job.communicate(timeout=120)
        wait_until(lambda: not left(hosts, idle), seconds=30)
    assert job.returncode == 0, out + err
    assert results(out) == results(expected.stdout), out + err
    assert_every_sample_was_seen(folder, epochs=epochs)
    assert {each.size for each in done(folder)} == {3}


def wait_for_steps_of_three(folder: Path) -> None:
    """Wait until three living workers have got further than any has now."""
    latest = max((each.steps for each in done(folder)), default=0)

    def ahead() -> int:
        return len({each.process_id for each in done(folder) if each.steps > latest and is_alive(each.process_id)})

    wait_until(lambda: ahead() == 3)


def cut_all_ssh(hosts: Hosts, name: str) -> None:
    """Kill the sessions of a host's sshd; the sshd itself goes on."""
    for number in hosts.processes(name):
        process = psutil.Process(number)
        if process.name().startswith("sshd") and "[listener]" not in " ".join(process.cmdline()):
            process.kill()
