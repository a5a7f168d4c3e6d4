"""The agent's rounds of workers that continue after others were killed."""

import socket

import pytest

from rankless.errors import CollectiveError
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.recovery.survivors import SurvivorRounds, WorkerChannels, WorkerHosts
from rankless.records.elastic_driver_protocol import (
    RoundEnded,
    RoundStarted,
    StateSynced,
    WorkerReady,
    receive_driver_message,
    send_message,
)
from rankless.records.events import Exited, Notice, Raised, ScriptFinished, Started


class Workers:
    """The workers' ends of the channels."""

    def __init__(self, count: int, most_lost: int, kinds: tuple[tuple[int, ...], ...] = ()) -> None:
        channels = WorkerChannels(range(count))
        self.rounds = SurvivorRounds(channels, WorkerHosts((0,) * count, kinds=kinds), most_lost, Peers())
        self.ends = [socket.socket(fileno=socket.dup(each)) for each in channels.descriptors]
        for end in self.ends:
            end.setblocking(False)
        self.rounds.judge([Started(rank=rank, time_ns=0, pid=100 + rank, log_file="") for rank in range(count)])

    def join(self, *ranks: int, round_number: int = 0) -> None:
        for rank in ranks:
            send_message(self.ends[rank], StateSynced(round=round_number))
        self.rounds.tick()

    def ask(self, *ranks: int, last_round: int = 0) -> None:
        for rank in ranks:
            send_message(self.ends[rank], WorkerReady(last_round=last_round))
        self.rounds.tick()

    def read(self, rank: int) -> list:
        found = []
        while True:
            try:
                found.append(receive_driver_message(self.ends[rank]))
            except BlockingIOError:
                return found

    def end(self, rank: int, code: int) -> list:
        return self.rounds.judge([Exited(rank=rank, time_ns=0, exit_code=code)])


@pytest.fixture
def three():
    workers = Workers(3, 2)
    workers.join(0, 1, 2)
    yield workers
    workers.rounds.channels.close()
    for end in workers.ends:
        end.close()


def test_a_killed_worker_ends_the_round_and_the_others_start_the_next(three):
    exited, notice = three.end(1, -9)
    assert exited.survivors == 2
    assert isinstance(notice, Notice)
    assert notice.text == "worker 1 (pid 101) was killed by SIGKILL; 2 workers continue"
    assert three.read(0) == three.read(2) == [RoundEnded(round=0)]
    three.ask(2)
    assert three.read(2) == []  # the other one has not asked
    three.ask(0)
    (started,) = three.read(0)
    assert isinstance(started, RoundStarted)
    assert (started.round, started.assignment.rank, started.assignment.size) == (1, 0, 2)
    (started,) = three.read(2)
    assert (started.round, started.assignment.rank, started.assignment.size) == (1, 1, 2)


@pytest.mark.parametrize(("found", "survivors"), [("the process of rank 1 has ended", 2), ("no", None)])
def test_a_survivor_may_report_its_lost_connection_before_the_death_is_known(three, found, survivors):
    error = CollectiveError(expected="all ranks in a barrier", found=found, fix="see why")
    raised = Raised(rank=0, time_ns=0, error_type=type(error).__name__, message=str(error), traceback=str(error))
    three.rounds.judge([raised, ScriptFinished(rank=0, time_ns=0, exit_code=1)])
    exited, *_ = three.end(1, -9)
    assert exited.survivors == survivors


def test_a_worker_that_is_killed_while_a_round_forms_ends_that_round(three):
    three.end(0, -11)
    three.ask(1, 2)
    assert three.read(1)[-1].round == 1
    exited, notice = three.end(2, -9)
    assert (exited.survivors, notice.text[-18:]) == (1, "1 worker continues")
    assert three.read(1) == [RoundEnded(round=1)]
    three.ask(1, last_round=1)
    (started,) = three.read(1)
    assert (started.round, started.assignment.size) == (2, 1)
    assert three.rounds.first == 1


def test_a_worker_that_cannot_join_a_round_ends_it_for_all(three):
    three.end(0, -9)
    three.ask(1, 2)
    three.read(1), three.read(2)
    three.ask(2, last_round=1)
    assert three.read(1) == three.read(2) == [RoundEnded(round=1)]
    three.ask(1, last_round=1)
    assert three.read(1)[0].round == 2


def test_a_round_waits_for_no_worker_whose_script_has_ended(three):
    assert three.end(0, 0) == [Exited(rank=0, time_ns=0, exit_code=0)]
    three.end(1, -9)
    three.ask(2)
    assert three.read(2)[-1].assignment.size == 1


@pytest.mark.parametrize(
    "before",
    [
        Raised(rank=0, time_ns=0, error_type="ValueError", message="", traceback=""),
        ScriptFinished(rank=0, time_ns=0, exit_code=3),
        Exited(rank=0, time_ns=0, exit_code=2),
    ],
    ids=lambda record: type(record).__name__,
)
def test_no_worker_is_survived_once_another_one_has_failed(three, before):
    three.rounds.judge([before])
    (exited,) = three.end(1, -9)
    assert exited.survivors is None
    assert three.read(2) == []


def test_a_worker_that_is_killed_before_all_have_joined_ends_the_run():
    workers = Workers(3, 2)
    workers.join(0, 1)
    (exited,) = workers.end(0, -9)
    assert exited.survivors is None


def test_no_more_workers_are_survived_than_allowed_and_not_the_last():
    workers = Workers(3, 1)
    workers.join(0, 1, 2)
    assert workers.end(0, -9)[0].survivors == 2
    assert workers.end(1, -9)[0].survivors is None
    alone = Workers(1, 1)
    alone.join(0)
    assert alone.end(0, -9)[0].survivors is None


def test_one_worker_of_each_kind_goes_on_or_has_ended_its_script():
    workers = Workers(4, 2, kinds=((0, 1), (2, 3)))
    workers.join(0, 1, 2, 3)
    assert workers.end(2, -9)[0].survivors == 3
    assert workers.end(3, -9)[0].survivors is None
    at_end = Workers(4, 2, kinds=((0, 1), (2, 3)))
    at_end.join(0, 1, 2, 3)
    assert at_end.end(2, 0) == [Exited(rank=2, time_ns=0, exit_code=0)]
    assert at_end.end(3, -9)[0].survivors == 2


def test_without_lost_workers_the_records_stay_as_they_are():
    exited = Exited(rank=0, time_ns=0, exit_code=-9)
    assert Workers(3, 0).rounds.judge([exited]) == [exited]
