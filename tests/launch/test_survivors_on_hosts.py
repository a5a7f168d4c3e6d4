"""Host 0's agent decides for the workers of all hosts, and the agents of others pass their messages on."""

import os
import signal
import socket
import subprocess

import msgspec
import pytest

from rankless.launch.recovery.survivors import SurvivorRelay, SurvivorRounds, WorkerChannels, WorkerHosts
from rankless.records.elastic_driver_protocol import (
    RoundEnded,
    StateSynced,
    WorkerReady,
    receive_driver_message,
    send_message,
)
from rankless.records.events import Exited, HostLost, Notice, Started

LOST = HostLost(rank=2, time_ns=0, host="b", how="was lost: no heartbeat for 4 s", host_index=1)


class OtherHosts:
    """The other agents: what they have received, and what their workers send."""

    def __init__(self) -> None:
        self.sent: list = []
        self.arrived: list = []
        self.to_kill: list[int] = []

    def send_to_worker(self, rank: int, message) -> None:
        self.sent.append((rank, message))

    def send_worker_message(self, rank: int, message) -> None:
        self.sent.append((rank, message))

    def take_worker_messages(self) -> list:
        taken, self.arrived = self.arrived, []
        return taken

    take_driver_messages = take_worker_messages

    def kill_worker(self, rank: int) -> None:
        self.to_kill.append(rank)

    def take_workers_to_kill(self) -> list[int]:
        taken, self.to_kill = self.to_kill, []
        return taken


def begin(*, most_lost: int = 4, with_processes: tuple[int, ...] = (0,)) -> tuple[SurvivorRounds, OtherHosts]:
    """Return the rounds of two workers on host a, two on b and one on c, which have all joined."""
    peers = OtherHosts()
    hosts = WorkerHosts((0, 0, 1, 1, 2), ("10.0.0.1", "10.0.0.2", "10.0.0.3"), frozenset(with_processes))
    rounds = SurvivorRounds(WorkerChannels(range(0)), hosts, most_lost, peers)
    peers.arrived = [(rank, StateSynced(round=0)) for rank in range(5)]
    rounds.tick()
    return rounds, peers


def test_a_lost_host_is_the_end_of_all_its_workers():
    rounds, peers = begin()
    host, first, second, notice = rounds.judge([LOST])
    assert isinstance(host, HostLost)
    assert host.is_covered
    assert [(each.rank, each.exit_code, each.survivors) for each in (first, second)] == [(2, -9, 3), (3, -9, 3)]
    assert isinstance(notice, Notice)
    assert notice.text == "host b was lost: no heartbeat for 4 s; 2 workers ended there; 3 workers continue"
    assert peers.sent == [(4, RoundEnded(round=0))]


def test_a_lost_host_loses_the_workers_that_it_still_had():
    rounds, _ = begin()
    rounds.judge([Exited(rank=3, time_ns=0, exit_code=-9)])
    _, only, notice = rounds.judge([LOST])
    assert (only.rank, only.survivors) == (2, 3)
    assert "1 worker ended there; 3 workers continue" in notice.text


@pytest.mark.parametrize("options", [{"with_processes": (0, 1)}, {"most_lost": 1}])
def test_a_lost_host_ends_the_run_if_it_has_servers_or_too_many_workers(options):
    rounds, peers = begin(**options)
    assert rounds.judge([LOST]) == [LOST]
    assert peers.sent == []
    (exited,) = rounds.judge([Exited(rank=4, time_ns=0, exit_code=-9)])
    assert exited.survivors is None


def test_a_round_begins_at_the_host_of_its_first_worker():
    rounds, peers = begin()
    for rank in (0, 1):
        rounds.judge([Exited(rank=rank, time_ns=0, exit_code=-9)])
    peers.sent.clear()
    peers.arrived = [(rank, WorkerReady(last_round=0)) for rank in (2, 3, 4)]
    rounds.tick()
    rank, started = peers.sent[0]
    assert {rank for rank, _ in peers.sent} == {3, 4, 2}
    assert (rank, started.address, started.assignment.size) == (2, "10.0.0.2", 3)
    assert (started.assignment.local_size, started.assignment.cross_size) == (2, 2)


def test_another_host_passes_messages_on():
    peers = OtherHosts()
    relay = SurvivorRelay(WorkerChannels(range(2, 4)), peers, 2)
    ends = [socket.socket(fileno=os.dup(each)) for each in relay.channels.descriptors]
    send_message(ends[0], StateSynced(round=0))
    exited = Exited(rank=2, time_ns=0, exit_code=-9)
    assert relay.judge([exited]) == [exited]
    assert peers.sent == [(2, StateSynced(round=0))]  # before host 0 gets the record
    peers.arrived = [(3, RoundEnded(round=0))]
    relay.tick()
    assert receive_driver_message(ends[1]) == RoundEnded(round=0)
    relay.channels.close()
    for end in ends:
        end.close()


def test_a_worker_that_holds_up_the_others_is_killed_by_the_agent_of_its_host():
    rounds, peers = begin(most_lost=1)
    assert not rounds.end_workers([3, 4])  # the run tolerates one
    assert rounds.end_workers([3])
    assert peers.to_kill == [3]
    with subprocess.Popen(["sleep", "60"]) as worker:
        relay = SurvivorRelay(WorkerChannels(range(2, 4)), peers, 2)
        relay.judge([Started(rank=3, time_ns=0, pid=worker.pid, log_file="")])
        relay.tick()
        assert worker.wait(10) == -signal.SIGKILL
        peers.to_kill = [3]
        relay.tick()  # one that has ended meanwhile
        relay.channels.close()


def test_a_lost_host_of_servers_alone_is_none_of_the_workers():
    rounds, peers = begin(with_processes=(3,))
    lost = HostLost(rank=-1, time_ns=0, host="d", how="was lost", host_index=3, is_covered=True)
    assert rounds.judge([lost]) == [lost]
    assert peers.sent == []
    rounds.judge([LOST])  # and a host of workers may be lost afterwards
    assert rounds.lost == {2, 3}


def test_a_lost_host_whose_servers_nobody_else_has_ends_the_run():
    rounds, _ = begin(with_processes=(3,))
    lost = HostLost(rank=-1, time_ns=0, host="d", how="was lost", host_index=3)
    assert rounds.judge([lost, LOST]) == [lost, LOST]
    assert rounds.lost == set()


def test_a_lost_host_of_workers_whose_servers_others_have_is_the_end_of_its_workers():
    rounds, _ = begin(with_processes=(1,))
    rounds.judge([msgspec.structs.replace(LOST, are_processes_covered=True)])
    assert rounds.lost == {2, 3}
