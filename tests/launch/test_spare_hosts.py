"""A run that has lost a host saves, and starts again with a spare host or with the lost one, as the same training."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from support.hosts import Hosts, some_hosts
from support.jobs import wait_until
from support.preempted_jobs import FORMS, PLAIN, TRAINING
from support.warm_runs import rankless

from rankless.config.hosts_and_addresses import parse_hosts
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Cluster, Program, RunRequest
from rankless.errors import JoinError
from rankless.launch.recovery import spare_hosts
from rankless.launch.signal_reader import REQUESTED, Interrupts
from rankless.records.events import HostLost, StopsHeeded

LINE = (sys.executable, "-m", "rankless", "run", "--devices", "cpu", "--no-progress", "--env", "PAUSE")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with some_hosts(tmp_path_factory.mktemp("three"), "abc") as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.py").write_text(PLAIN.replace("EVERY", "1").replace("READERS", "{}"))
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True)
    return torch.load(folder / "results.pt")


def start(hosts: Hosts, folder: Path, *options: str, text: str = TRAINING, pause: float) -> subprocess.Popen[str]:
    """Start the training, with a pause of some seconds after each step."""
    counted = text.replace("    calls += 1\n", "    calls += 1\n    open(f'calls{calls}', 'w').close()\n")
    (folder / "script.py").write_text(counted)
    return hosts.start("a", (*LINE, *options, "script.py"), cwd=folder, env={"PAUSE": str(pause)})


def require_same(folder: Path, plain: dict) -> None:
    found = torch.load(folder / "results.pt")
    for name in ("model", "states"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-10, atol=1e-13)


def kill_agent(hosts: Hosts, name: str) -> bool:
    """Kill the agent of a host, and return whether there was one."""
    for process_id in hosts.processes(name):
        with contextlib.suppress(psutil.Error):
            if "agent of" in " ".join(psutil.Process(process_id).cmdline()):
                os.kill(process_id, signal.SIGKILL)
                return True
    return False


def end(hosts: Hosts, job: subprocess.Popen[str], folder: Path, *, link: str = "", killed: str = "") -> str:
    """Lose a host after five steps, and return what the run writes to standard error, which must end in order."""
    wait_until(lambda: (folder / "calls5").exists() or job.poll() is not None)
    try:
        if link:
            hosts.link(link, up=False)
        if killed:
            assert kill_agent(hosts, killed)
        _, errors = job.communicate(timeout=180)
    finally:
        if link:
            hosts.link(link, up=True)
    assert job.returncode == 0, errors
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("killed", "the connection"), pytest.param("link", "no heartbeat for", marks=pytest.mark.exhaustive)],
)
def test_a_spare_host_takes_the_place_of_a_lost_one(how: str, reason: str, hosts: Hosts, tmp_path: Path, plain: dict):
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", pause=0.4)
    errors = end(hosts, job, tmp_path, **{how: "b"})
    assert f"host b was lost: {reason}" in errors
    assert "2 workers continue\n" in errors
    assert "rankless: host c takes the place of host b; started again\n" in errors
    assert errors.count("rankless: 4 workers") == 2
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_lost_host_returns(hosts: Hosts, tmp_path: Path, plain: dict):
    job = start(hosts, tmp_path, "--hosts", "a:1,b:2", pause=1.0)
    errors = end(hosts, job, tmp_path, killed="b")
    assert "host b was lost: the connection" in errors, errors
    assert "rankless: host b is back; started again\n" in errors
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_new_host_may_be_lost_while_the_run_starts_again(hosts: Hosts, tmp_path: Path, plain: dict):
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", pause=0.4)
    wait_until(lambda: (tmp_path / "calls5").exists() or job.poll() is not None)
    kill_agent(hosts, "b")
    wait_until(lambda: kill_agent(hosts, "c") or job.poll() is not None)
    _, errors = job.communicate(timeout=180)
    assert job.returncode == 0, errors
    assert "rankless: host c takes the place of host b; started again\n" in errors
    assert "tries once more\n" in errors or "rankless: host b takes the place of host c; started again\n" in errors
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_request_of_the_user_ends_the_run_although_a_host_can_join(hosts: Hosts, tmp_path: Path):
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", pause=1.5)
    wait_until(lambda: (tmp_path / "calls2").exists() or job.poll() is not None)
    kill_agent(hosts, "b")
    assert job.stderr is not None
    errors = ""
    while "host c can join" not in errors:
        errors += job.stderr.readline()
    job.terminate()
    errors += job.communicate(timeout=60)[1]
    assert job.returncode == 75, errors
    assert "started again" not in errors
    assert len(list((tmp_path / "kept").glob("step-*"))) == 1


@pytest.mark.exhaustive
def test_a_run_that_cannot_continue_starts_again_on_the_spare_host(hosts: Hosts, tmp_path: Path, plain: dict):
    text = FORMS["saved too"].replace("optimizer=optimizer)\ndef", 'optimizer=optimizer, zero="parameters")\ndef')
    options = ("--hosts", "a:2,b:2,c:2", "--spares", "1", "--restarts", "1")
    errors = end(hosts, start(hosts, tmp_path, *options, text=text, pause=0.3), tmp_path, link="b")
    assert "started again, restart 1 of 1\n" in errors
    assert "rankless: host c takes the place of host b; started again\n" in errors
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_script_that_heeds_no_request_has_fewer(hosts: Hosts, tmp_path: Path, plain: dict):
    text = TRAINING.replace(", autosave=True", "")
    job = start(hosts, tmp_path, "--hosts", "a:2,b:2,c:2", "--spares", "1", text=text, pause=0.5)
    errors = end(hosts, job, tmp_path, link="b")
    assert errors.count("rankless: host c could join, if the script saved when it is asked to stop: ") == 1
    assert errors.count("rankless: 4 workers") == 1
    require_same(tmp_path, plain)


@pytest.mark.exhaustive
def test_a_spare_host_that_does_not_answer_is_named_at_the_start(hosts: Hosts, tmp_path: Path, plain: dict):
    hosts.link("c", up=False)
    try:
        job = start(hosts, tmp_path, "--hosts", "a:1,b:1,c:1", "--spares", "1", pause=0.5)
        _, errors = job.communicate(timeout=120)
    finally:
        hosts.link("c", up=True)
    assert job.returncode == 0, errors
    assert "rankless: the spare host c cannot be used: " in errors
    require_same(tmp_path, plain)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("-n", "2", "--spares", "1"), "--spares 1 with this host only"),
        (("--hosts", "127.0.0.1:1,b:1", "--spares", "1"), "--spares 1 with 2 hosts"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "-1"), "--spares -1 with 3 hosts"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--no-ssh"), "--spares 1 with a command on each host"),
        (("--hosts", "127.0.0.1:1,b:2,c:1", "--spares", "1"), "c with 1"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--no-replace"), "found:    --no-replace"),
        (("--hosts", "127.0.0.1:1,b:1,c:1", "--spares", "1", "--servers", "1"), "options of servers"),
    ],
)
def test_spares_that_no_run_can_have_are_refused(tmp_path: Path, options: tuple[str, ...], found: str):
    (tmp_path / "train.py").write_text("print(1)")
    done = rankless("run", *options, "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr


class Attempts:
    """Attempts whose hosts are lost as a test says. Each returns what ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: str, *, spares: str = "", absent: str = "") -> None:
        monkeypatch.setattr(spare_hosts, "PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(spare_hosts, "RETURN_SECONDS", 0.0 if "returns" in absent else 60.0)
        given, waiting = (parse_hosts(names, workers_per_host=None) if names else () for names in (hosts, spares))
        cluster = Cluster(hosts=given, host_index=0, spares=waiting, join_timeout_seconds=1.0)
        config = make_run_config(
            Program(kind="code", target="pass"), RunRequest(worker_count=1, devices="cpu", cluster=cluster)
        )
        self.absent, self.shown, self.used = set(absent.split(",")), [], []
        self.hosts = spare_hosts.HostReplacements(
            config, notify=self.shown.append, explain_absence=lambda host: "gone" if host.address in self.absent else ""
        )

    def run(self, *attempts) -> str:
        """Return how the last of some attempts has ended. Each is a function of `lose` and `heed`, or an error."""
        left = list(attempts)

        def run_once(config, observer):
            self.used.append(",".join(map(str, config.cluster.hosts)))
            attempt = left.pop(0)
            if isinstance(attempt, Exception):
                raise attempt
            with Interrupts() as interrupts:
                observer.begin(interrupts)
                outcome, steps = attempt(Events(interrupts, observer.receive))
            self.shown += observer.take_notices()
            return Summary(outcome, steps)

        try:
            ended = self.hosts.run(run_once)
        finally:
            self.hosts.close()
        assert not left
        return ended.outcome


class Summary(NamedTuple):
    outcome: str
    steps: int


class Events:
    """What happens in an attempt."""

    def __init__(self, interrupts: Interrupts, observe) -> None:
        self.interrupts, self.observe = interrupts, observe

    def lose(self, *places: int) -> None:
        for place in places:
            self.observe(HostLost(rank=place, time_ns=0, host="", how="", host_index=place))

    def heed(self) -> None:
        self.observe(StopsHeeded(rank=0, time_ns=0))

    def is_asked(self, seconds: float = 5.0) -> bool:
        """Return whether the run asks its workers to stop."""
        ready, _, _ = select.select([self.interrupts], [], [], seconds)
        return bool(ready) and self.interrupts.read() == [REQUESTED]


def lose_and_stop(*places: int):
    def attempt(events: Events):
        events.heed()
        events.lose(*places)
        assert events.is_asked()
        return "preempted", 5

    return attempt


def train_on(*places: int, outcome: str = "succeeded", steps: int = 5):
    """Return an attempt that is never asked to stop."""

    def attempt(events: Events):
        events.heed()
        events.lose(*places)
        assert not events.is_asked(0.3)
        return outcome, steps

    return attempt


def succeed(_events: Events):
    return "succeeded", 5


def test_a_spare_host_is_preferred_and_the_lost_one_waits_in_its_stead(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts(monkeypatch, "a,b,c", spares="d")
    assert attempts.run(lose_and_stop(1), succeed) == "succeeded"
    assert attempts.used == ["a,b,c", "a,d,c"]
    assert attempts.shown == [
        "host d can join: the run saves, and starts again",
        "host d takes the place of host b; started again",
    ]


def test_a_lost_host_returns_later_than_a_spare_one(monkeypatch: pytest.MonkeyPatch):
    assert Attempts(monkeypatch, "a,b").run(train_on(1)) == "succeeded"  # it may return after a while
    monkeypatch.undo()
    attempts = Attempts(monkeypatch, "a,b", absent="returns")
    assert attempts.run(lose_and_stop(1), succeed) == "succeeded"
    assert attempts.used == ["a,b", "a,b"]
    assert attempts.shown[-1] == "host b is back; started again"


def test_all_lost_hosts_must_be_replaced(monkeypatch: pytest.MonkeyPatch):
    assert Attempts(monkeypatch, "a,b,c", spares="d").run(train_on(1, 2)) == "succeeded"
    monkeypatch.undo()
    attempts = Attempts(monkeypatch, "a,b,c", spares="d,e")
    assert attempts.run(lose_and_stop(2, 1), succeed) == "succeeded"
    assert attempts.used[-1] == "a,d,e"


def test_a_spare_host_with_another_number_of_workers_is_left(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts(monkeypatch, "a:1,b:2,c:1", spares="d:1,e:2")
    assert attempts.run(lose_and_stop(1), lose_and_stop(2), succeed) == "succeeded"
    assert attempts.used == ["a,b,c", "a,e,c", "a,e,d"]


def test_a_spare_host_that_does_not_answer_is_named_and_left(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts(monkeypatch, "a,b", spares="c,d", absent="c")
    assert attempts.run(lose_and_stop(1), succeed) == "succeeded"
    assert attempts.used[-1] == "a,d"
    assert attempts.shown[0] == "the spare host c cannot be used: gone"


def test_the_first_host_has_no_replacement(monkeypatch: pytest.MonkeyPatch):
    assert Attempts(monkeypatch, "a,b", spares="c").run(train_on(0)) == "succeeded"


def test_a_script_that_heeds_no_request_is_not_asked_and_why_is_shown_once(monkeypatch: pytest.MonkeyPatch):
    def attempt(events: Events):
        events.lose(1)
        assert not events.is_asked(0.3)
        return "succeeded", 5

    attempts = Attempts(monkeypatch, "a,b", spares="c")
    assert attempts.run(attempt) == "succeeded"
    (shown,) = attempts.shown
    assert shown.startswith("host c could join, if the script saved")


def test_a_run_that_somebody_else_has_asked_to_stop_does_not_start_again(monkeypatch: pytest.MonkeyPatch):
    def attempt(events: Events):
        events.heed()
        events.lose(1)
        assert events.is_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert events.interrupts.read() == [signal.SIGTERM]
        return "preempted", 5

    attempts = Attempts(monkeypatch, "a,b", spares="c")
    assert attempts.run(attempt) == "preempted"
    assert attempts.used == ["a,b"]


def test_a_run_that_ends_although_it_was_asked_to_stop_does_not_start_again(monkeypatch: pytest.MonkeyPatch):
    def end_with(outcome: str):
        return lambda events: (outcome, lose_and_stop(1)(events)[1])

    for outcome in ("succeeded", "failed"):
        assert Attempts(monkeypatch, "a,b", spares="c").run(end_with(outcome)) == outcome


def test_a_start_without_the_new_host_is_repeated_but_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    gone = JoinError(expected="host c", found="nothing", fix="none")
    attempts = Attempts(monkeypatch, "a,b", spares="c")
    assert attempts.run(lose_and_stop(1), gone, gone, gone, succeed) == "succeeded"
    with pytest.raises(JoinError):
        Attempts(monkeypatch, "a,b", spares="c").run(lose_and_stop(1), gone, gone, gone, gone)
    with pytest.raises(JoinError):
        Attempts(monkeypatch, "a,b", spares="c").run(gone)


def test_a_host_that_has_gone_when_the_run_starts_again_is_replaced(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts(monkeypatch, "a,b", spares="c,d")

    def ask_and_lose(events: Events):
        ended = lose_and_stop(1)(events)
        attempts.absent.add("c")
        return ended

    assert attempts.run(ask_and_lose, JoinError(expected="c", found="nothing", fix="none"), succeed) == "succeeded"
    assert attempts.used == ["a,b", "a,c", "a,d"]


def test_a_host_that_is_lost_before_the_first_step_of_a_new_start_is_replaced(monkeypatch: pytest.MonkeyPatch):
    def lose_at_the_start(events: Events):
        events.lose(1)
        return "failed", 0

    attempts = Attempts(monkeypatch, "a,b", spares="c,d")
    assert attempts.run(lose_and_stop(1), lose_at_the_start, succeed) == "succeeded"
    assert attempts.used == ["a,b", "a,c", "a,d"]
    assert (
        Attempts(monkeypatch, "a,b", spares="c,d").run(lose_at_the_start) == "failed"
    )  # the first start has no other to go back to
    assert Attempts(monkeypatch, "a,b", spares="c").run(lose_and_stop(1), train_on(outcome="failed")) == "failed"


DRIVER = """
import os, sys, threading, time
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Program, RunRequest
from rankless.launch import agent

def wait_and_request(interrupts):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    time.sleep(0.4)
    interrupts.request()

class Observer(agent.NoObserver):
    def begin(self, interrupts):
        threading.Thread(target=wait_and_request, args=(interrupts,)).start()

context = agent.AgentContext(observer=Observer())
config = make_run_config(Program(kind="script", target="slow.py"), RunRequest(worker_count=2, devices="cpu"))
sys.exit(agent.run(config, on_record=lambda _: None, out=sys.stdout, err=sys.stderr, context=context))
"""
SLOW = """
import os, time
import rankless

while not rankless.stopping():
    open("asking", "w").close()
    time.sleep(0.02)
open("saving", "w").close()
time.sleep(2.5)
open("saved", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("requested_at", "terminated_at"), [("asking", "saving"), ("saving", "asking")])
def test_a_request_and_a_signal_leave_workers_the_time_to_save(requested_at: str, terminated_at: str, tmp_path: Path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "slow.py").write_text(SLOW)
    words = [sys.executable, "driver.py", requested_at]
    job = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / terminated_at).exists() or job.poll() is not None)
    time.sleep(0.4)  # after the time in which a second signal belongs to the first
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert (tmp_path / "saved").exists()


def test_a_wait_for_a_host_says_for_which_and_how_long(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts(monkeypatch, "a,b", spares="c", absent="b,c")
    attempts.hosts.receive(HostLost(rank=1, time_ns=0, host="", how="", host_index=1))
    attempts.hosts.replace_lost()
    attempts.hosts.close()
    assert attempts.shown == ["waits for a host in the place of host b, at most 1 s (--join-timeout)"]
