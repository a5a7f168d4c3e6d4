"""Which workers continue after some were killed, in a run whose other processes have what a step needs of them.

It uses the rounds of elastic jobs (Note [rounds] in `records.elastic_driver_protocol`), and the protocol of
`survivor_membership`.

Host 0's agent decides for the workers of all hosts. The agents of other hosts pass messages on (`SurvivorRelay`).
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rankless.config.hosts_and_addresses import LOOPBACK
from rankless.config.process_configs import WorkerLaunch
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.recovery.survivor_membership import (
    Asked,
    Ended,
    EndRound,
    Event,
    Failed,
    Joined,
    Killed,
    Limits,
    Replace,
    Replaced,
    StartRound,
    begin,
    can_lose,
    transition,
)
from rankless.launch.rendezvous.other_hosts_during_run import LeaderPeer
from rankless.launch.signal_reader import name_signal
from rankless.launch.supervisor.failure_attribution import is_secondary_failure
from rankless.records.elastic_driver_protocol import (
    DriverMessage,
    ReplacementEnded,
    ReplacementWanted,
    RoundEnded,
    RoundStarted,
    StateSynced,
    WorkerMessage,
    assign_ranks,
    open_message_channel,
    receive_worker_message,
    send_message,
)
from rankless.records.encoding import encode_json
from rankless.records.events import NO_RANK, AnyRecord, Exited, HostLost, Notice, Raised, ScriptFinished, Started

KILLED = -9
"""The exit code that stands for the end of a worker on a lost host."""


class WorkerHosts(NamedTuple):
    """Where the workers of a run are.

    Args:
        host_of: The index of each worker's host, by rank.
        addresses: The address of each host, by which the others reach it; empty for a run on one host.
        with_processes: The hosts that have processes beside the workers: without one of these no worker continues.
        kinds: The workers of each kind, where some are heterogeneous. One of each must be left.
        are_replaced: Whether a worker of its host is copied in the place of a lost one.
        copies_first: Whether the first one may be copied, too.
    """

    host_of: tuple[int, ...]
    addresses: tuple[str, ...] = ()
    with_processes: frozenset[int] = frozenset()
    kinds: tuple[tuple[int, ...], ...] = ()
    are_replaced: bool = False
    copies_first: bool = False


class WorkerChannels:
    """One channel to each worker of this host, by rank."""

    def __init__(self, ranks: range) -> None:
        """Open a channel to each worker. None if there are no ranks."""
        pairs = {rank: open_message_channel() for rank in ranks}
        self._own = {rank: own for rank, (own, _) in pairs.items()}
        self._worker_ends = [end for _, end in pairs.values()]
        for channel in self._own.values():
            channel.setblocking(False)
        self._launches: dict[int, WorkerLaunch] = {}
        self.on_replaced: Callable[[int, int], None] = lambda _rank, _process_id: None
        """Called with the rank of a lost worker and the process id of the one that takes its place."""

    def know_launches(self, launches: Sequence[WorkerLaunch]) -> None:
        """Know how the workers of this host are started, for those that take their place."""
        self._launches = {launch.config.rank: launch for launch in launches}

    @property
    def descriptors(self) -> list[int]:
        """The workers' ends of the channels, in the order of their ranks."""
        return [end.fileno() for end in self._worker_ends]

    def forget_worker_ends(self) -> None:
        """Close the workers' ends in this process: the workers have them."""
        for end in self._worker_ends:
            end.close()
        self._worker_ends = []

    def close(self) -> None:
        """Close all channels."""
        self.forget_worker_ends()
        for channel in self._own.values():
            channel.close()
        self._own.clear()

    def receive(self) -> Iterator[tuple[int, WorkerMessage]]:
        """Yield the messages that have arrived, each with the rank of its worker."""
        for rank in list(self._own):
            for message in self._receive_from(rank):
                yield rank, message

    def send(self, rank: int, message: DriverMessage) -> None:
        """Send a message to a worker of this host. One that has ended gets none."""
        channel = self._own.get(rank)
        if channel is None:
            return
        with contextlib.suppress(OSError):  # the worker has ended, which the fork server reports
            if isinstance(message, ReplacementWanted):
                self._send_want(channel, message)
            else:
                send_message(channel, message)

    def _send_want(self, channel: socket.socket, message: ReplacementWanted) -> None:
        """Send what the new worker needs: how the lost one was started, a new channel, and the status page."""
        launch = self._launches[message.lost]
        own, end = open_message_channel()
        own.setblocking(False)
        if (before := self._own.pop(message.lost, None)) is not None:
            before.close()
        self._own[message.lost] = own
        page = launch.config.status_descriptor
        with end:
            descriptors = [end.fileno()] if page is None else [end.fileno(), page]
            filled = msgspec.structs.replace(message, launch=encode_json(launch))
            send_message(channel, filled, descriptors=descriptors)

    def _receive_from(self, rank: int) -> Iterator[WorkerMessage]:
        while rank in self._own:
            try:
                message = receive_worker_message(self._own[rank])
            except BlockingIOError:
                return
            except msgspec.MsgspecError:
                continue  # a user's process may write other data to the descriptor
            if message is None:
                self._own.pop(rank).close()  # the fork server reports how the worker ended
                return
            if isinstance(message, ReplacementEnded) and message.process_id is not None:
                self.on_replaced(message.lost, message.process_id)
            yield message


class SurvivorRounds:
    """Decides whether a run continues without a worker, and starts rounds of those that are left.

    The decisions are those of `survivor_membership.transition`; this class has the channels and the records.
    """

    def __init__(
        self,
        channels: WorkerChannels,
        hosts: WorkerHosts,
        most_lost: int,
        peers: Peers,
        end_store_round: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Decide for all workers of a run.

        Args:
            channels: The channels to those of this host.
            hosts: Where all of them are.
            most_lost: How many lost workers the run tolerates. 0: none.
            peers: The agents of the other hosts.
            end_store_round: Ends a round of the run's store. Default: nothing waits in one.
        """
        self.channels, self._hosts, self._peers = channels, hosts, peers
        self._end_store_round = end_store_round
        self._limits = Limits(
            most_lost, hosts.kinds, hosts.host_of if hosts.are_replaced else (), copies_first=hosts.copies_first
        )
        self._state = begin(len(hosts.host_of))
        self._process_ids: dict[int, int] = {}
        self._notices: list[Notice] = []

    @property
    def lost(self) -> frozenset[int]:
        """The workers without which the others continue."""
        return self._state.lost

    @property
    def first(self) -> int:
        """The first worker that was not lost."""
        return min(set(range(len(self.lost) + 1)) - self.lost)

    def judge(self, records: Sequence[AnyRecord]) -> list[AnyRecord]:
        """Return records of workers. The ends of lost workers say how many continue, and a notice follows them."""
        judged: list[AnyRecord] = []
        for record in records:
            judged += self._judge(record) if self._limits.most_lost else [record]
        return judged

    def _judge(self, record: AnyRecord) -> list[AnyRecord]:
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
        elif isinstance(record, Raised):
            self._take(Failed(record.rank, is_secondary=is_secondary_failure(record)))
        elif isinstance(record, ScriptFinished) and record.exit_code:
            self._take(Failed(record.rank))
        elif isinstance(record, HostLost):
            return self._judge_host(record)
        elif isinstance(record, Exited) and record.rank in self._state.living:
            return self._judge_exit(record)
        return [record]

    def _judge_exit(self, record: Exited) -> list[AnyRecord]:
        if record.exit_code >= 0:
            self._take(Ended(record.rank, record.exit_code))
        if record.exit_code >= 0 or not self._lose({record.rank}):
            return [record]
        how = f"was killed by {name_signal(-record.exit_code)}"
        text = f"worker {record.rank} (pid {self._process_ids.get(record.rank)}) {how}; {self._describe_living()}"
        counted = msgspec.structs.replace(record, survivors=len(self._state.living))
        return [counted, self._make_notice(record.rank, text)]

    def _judge_host(self, record: HostLost) -> list[AnyRecord]:
        """Return the ends of the workers of a lost host, if the others continue without them."""
        host = record.host_index
        lost = {rank for rank in self._state.living if self._hosts.host_of[rank] == host}
        is_needed = host in self._hosts.with_processes and not record.are_processes_covered
        if record.is_covered or (not is_needed and not lost):
            return [record]
        if is_needed:
            self._take(Failed(NO_RANK))
        if is_needed or not self._lose(lost):
            return [record]
        now, count, living = time.monotonic_ns(), len(lost), len(self._state.living)
        ends = [Exited(rank=rank, time_ns=now, exit_code=KILLED, survivors=living) for rank in sorted(lost)]
        text = f"host {record.host} {record.how}; {count} worker{'s' if count != 1 else ''} ended there; "
        covered = msgspec.structs.replace(record, is_covered=True)
        return [covered, *ends, self._make_notice(record.rank, text + self._describe_living())]

    def _lose(self, ranks: set[int]) -> bool:
        """Continue without workers that were killed, if that is possible. Return whether it is."""
        self._receive()  # what they have sent before
        self._take(Killed(frozenset(ranks)))
        return self._state.lost >= ranks

    def end_workers(self, ranks: Sequence[int]) -> bool:
        """Kill workers that hold up the others, if these can continue. Return whether they can."""
        if not can_lose(self._state, ranks, self._limits):
            return False
        for rank in ranks:
            if self._hosts.host_of[rank] == self._hosts.host_of[0]:
                os.kill(self._process_ids[rank], signal.SIGKILL)  # the fork server reports its end
            else:
                self._peers.kill_worker(rank)
        return True

    def _describe_living(self) -> str:
        count = len(self._state.living)
        return f"{count} worker{'s continue' if count > 1 else ' continues'}"

    def _make_notice(self, rank: int, text: str) -> Notice:
        return Notice(rank=rank, time_ns=time.monotonic_ns(), text=text)

    def tick(self) -> list[Notice]:
        """Take the workers' messages, and return notices. A round starts once all have asked for it."""
        self._receive()
        notices, self._notices = self._notices, []
        return notices

    def _receive(self) -> None:
        for rank, message in [*self.channels.receive(), *self._peers.take_worker_messages()]:
            if isinstance(message, StateSynced):
                self._take(Joined(rank))
            elif isinstance(message, ReplacementEnded):
                self._end_replacement(rank, message)
            else:
                self._take(Asked(rank, message.last_round, message.progress, is_complete=message.has_state))

    def _end_replacement(self, copied: int, ended: ReplacementEnded) -> None:
        lost, count = ended.lost, len(self._state.living | {ended.lost})
        text = f"worker {lost} is not replaced: {ended.reason}"
        if not ended.reason:
            text = f"worker {lost} is replaced by a copy of worker {copied} (pid {ended.process_id}); {count} workers"
        self._notices.append(self._make_notice(lost, text))
        self._take(Replaced(lost, is_made=not ended.reason))

    def _take(self, event: Event) -> None:
        self._state, actions = transition(self._state, event, self._limits)
        for action in actions:
            if isinstance(action, EndRound):
                self._send(action.members, RoundEnded(round=action.number))
                if action.number:
                    self._end_store_round(action.number)
            elif isinstance(action, Replace):
                self._send(action.members, ReplacementWanted(lost=action.lost))
            else:
                for rank in action.members:
                    self._send([rank], self._make_start(action, rank))

    def _make_start(self, started: StartRound, rank: int) -> RoundStarted:
        hosts = self._hosts
        assignments = assign_ranks([str(hosts.host_of[member]) for member in started.members])
        address = hosts.addresses[hosts.host_of[started.members[0]]] if hosts.addresses else LOOPBACK
        assignment = assignments[started.members.index(rank)]
        return RoundStarted(round=started.number, assignment=assignment, address=address, must_sync=False)

    def _send(self, ranks: Iterable[int], message: DriverMessage) -> None:
        own_host = self._hosts.host_of[0]
        for rank in ranks:
            if self._hosts.host_of[rank] == own_host:
                self.channels.send(rank, message)
            else:
                self._peers.send_to_worker(rank, message)


class SurvivorRelay:
    """Passes messages between the workers of this host and host 0's agent, which decides."""

    def __init__(self, channels: WorkerChannels, leader: LeaderPeer, first: int) -> None:
        """Pass messages on.

        Args:
            channels: The channels to the workers of this host.
            leader: Host 0.
            first: The rank of this host's first worker.
        """
        self.channels, self._leader = channels, leader
        self.first = first
        self._process_ids: dict[int, int] = {}

    def judge(self, records: Sequence[AnyRecord]) -> list[AnyRecord]:
        """Return records as they are. Host 0 gets them after what their workers have sent."""
        self._process_ids.update((record.rank, record.pid) for record in records if isinstance(record, Started))
        self._send_messages()
        return list(records)

    def end_workers(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002  # as of `SurvivorRounds`
        """Return False: host 0 decides."""
        return False

    def tick(self) -> list[Notice]:
        """Pass messages on, in both directions. Host 0 has the notices."""
        self._send_messages()
        for rank, message in self._leader.take_driver_messages():
            self.channels.send(rank, message)
        for rank in self._leader.take_workers_to_kill():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self._process_ids[rank], signal.SIGKILL)
        return []

    def _send_messages(self) -> None:
        for rank, message in self.channels.receive():
            self._leader.send_worker_message(rank, message)


def make_survivors(job: ReadyJob) -> SurvivorRounds | SurvivorRelay:
    """Return this host's part in letting workers continue without lost ones."""
    start, peers = job.start, job.peers
    first = start.first_rank(job.host_index)
    channels = WorkerChannels(range(first, start.first_rank(job.host_index + 1)))
    if isinstance(peers, LeaderPeer):
        return SurvivorRelay(channels, peers, first)
    hosts = WorkerHosts(
        host_of=tuple(map(start.host_of, range(start.world_size))),
        addresses=start.addresses,
        with_processes=frozenset(host for processes in start.roles.values() for host in processes.hosts),
        kinds=next((axis.stage_workers for axis in start.mesh if axis.stage_workers), ()),
        are_replaced=start.replaces_workers,
        copies_first=start.copies_first_worker,
    )
    end_store_round = (lambda _: None) if job.store is None else job.store.end_round
    return SurvivorRounds(channels, hosts, start.most_lost_workers, peers, end_store_round)
