"""Which workers go on after some were killed, in a run whose parameter servers keep the rows.

It uses the rounds of elastic jobs (Note [rounds] in `records.elastic_messages`). Round 0 is the process group with
which the run begins. When a worker is killed by a signal, its round ends, and all living workers ask for the next one.
It starts once all have asked. A worker whose script has ended asks no more.
"""

import socket
import time
from collections.abc import Iterator, Sequence

import msgspec

from rankless.launch.signals import name_signal
from rankless.launch.supervisor.failure_attribution import is_secondary_failure
from rankless.records.elastic_messages import (
    DriverMessage,
    RankAssignment,
    RoundEnded,
    RoundStarted,
    StateSynced,
    StoreReady,
    WorkerMessage,
    WorkerReady,
    open_message_channel,
    receive_worker_message,
    send_message,
)
from rankless.records.events import AnyRecord, Exited, Notice, Raised, ScriptFinished, Started

ADDRESS = "127.0.0.1"


class SurvivorRounds:
    """Decides whether a run goes on without a worker, and starts rounds of those that are left."""

    def __init__(self, worker_count: int, most_lost: int) -> None:
        """Open a channel to each worker.

        Args:
            worker_count: Number of workers, all on this host.
            most_lost: Without how many of them the others go on. 0: never, and there are no channels.
        """
        pairs = [open_message_channel() for _ in range(worker_count)] if most_lost else []
        self._channels = {rank: own for rank, (own, _) in enumerate(pairs)}
        self._worker_ends = [end for _, end in pairs]
        for channel in self._channels.values():
            channel.setblocking(False)
        self._most_lost = most_lost
        self.lost: set[int] = set()
        """The workers without which the others go on."""
        self._living = set(self._channels)
        self._joined: set[int] = set()
        """The workers that have been in a round."""
        self._ready: set[int] = set()
        self._process_ids: dict[int, int] = {}
        self._round = 0
        self._members: list[int] = sorted(self._living)
        self._has_ended = False
        """Whether the last round has ended."""
        self._has_failed = False
        """Whether a worker has failed by itself, so that the run ends."""
        self._interrupted: set[int] = set()
        """The workers that a lost connection has ended. The death of its peer may be reported later."""

    @property
    def descriptors(self) -> list[int]:
        """The workers' ends of the channels, by rank."""
        return [end.fileno() for end in self._worker_ends]

    @property
    def first(self) -> int:
        """The first worker that was not lost."""
        return min(set(range(len(self.lost) + 1)) - self.lost)

    def forget_worker_ends(self) -> None:
        """Close the workers' ends in this process: the workers have them."""
        for end in self._worker_ends:
            end.close()
        self._worker_ends = []

    def close(self) -> None:
        """Close all channels."""
        self.forget_worker_ends()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def judge(self, records: Sequence[AnyRecord]) -> list[AnyRecord]:
        """Return records of workers, where the ends of lost workers say how many go on, and a notice follows them."""
        judged: list[AnyRecord] = []
        for record in records:
            judged += self._judge(record) if self._channels else [record]
        return judged

    def _judge(self, record: AnyRecord) -> list[AnyRecord]:
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
        elif isinstance(record, Raised) and is_secondary_failure(record):
            self._interrupted.add(record.rank)
        elif isinstance(record, Raised) or (isinstance(record, ScriptFinished) and record.exit_code):
            self._has_failed = self._has_failed or record.rank not in self._interrupted
        if not isinstance(record, Exited) or record.rank not in self._living:
            return [record]
        self._receive_messages()
        may_go_on = self._joined >= self._living - {record.rank} and not self._has_failed
        self._living.discard(record.rank)
        self._ready.discard(record.rank)
        if record.exit_code == 0:
            return [record]
        if record.exit_code > 0 or not may_go_on or not self._living or len(self.lost) == self._most_lost:
            self._has_failed = True
            return [record]
        self.lost.add(record.rank)
        self._end_round()
        count, signal_name = len(self._living), name_signal(-record.exit_code)
        text = (
            f"worker {record.rank} (pid {self._process_ids.get(record.rank)}) was killed by {signal_name}; "
            f"{count} worker{'s go' if count > 1 else ' goes'} on"
        )
        notice = Notice(rank=record.rank, time_ns=time.monotonic_ns(), text=text)
        return [msgspec.structs.replace(record, survivors=count), notice]

    def tick(self) -> None:
        """Take the workers' messages, and start a round if all are ready."""
        self._receive_messages()
        if self._ready and self._ready >= self._living and not self._has_failed:
            self._start_round()

    def _receive_messages(self) -> None:
        for rank in list(self._channels):
            for message in self._read_messages(rank):
                self._take(rank, message)

    def _read_messages(self, rank: int) -> Iterator[WorkerMessage]:
        while rank in self._channels:
            try:
                message = receive_worker_message(self._channels[rank])
            except BlockingIOError:
                return
            except msgspec.MsgspecError:
                continue  # a user's process may write other data to the descriptor
            if message is None:
                self._channels.pop(rank).close()  # the fork server reports how the worker ended
                return
            yield message

    def _take(self, rank: int, message: WorkerMessage) -> None:
        if isinstance(message, StateSynced):
            self._joined.add(rank)
        elif isinstance(message, StoreReady):
            if message.round == self._round and not self._has_ended:
                for other in self._members[1:]:
                    self._send(other, self._make_start(other, message.port))
        elif isinstance(message, WorkerReady) and rank in self._living:
            self._ready.add(rank)
            if message.last_round == self._round > 0:  # it could not join the others
                self._end_round()

    def _start_round(self) -> None:
        self._round += 1
        self._members, self._ready, self._has_ended = sorted(self._living), set(), False
        self._send(self._members[0], self._make_start(self._members[0], None))

    def _make_start(self, rank: int, port: int | None) -> RoundStarted:
        place, size = self._members.index(rank), len(self._members)
        assignment = RankAssignment(
            rank=place, size=size, local_rank=place, local_size=size, cross_rank=0, cross_size=1
        )
        return RoundStarted(round=self._round, assignment=assignment, address=ADDRESS, port=port, must_sync=False)

    def _end_round(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            for rank in self._living:
                self._send(rank, RoundEnded(round=self._round))

    def _send(self, rank: int, message: DriverMessage) -> None:
        channel: socket.socket | None = self._channels.get(rank)
        if channel is not None:
            try:
                send_message(channel, message)
            except OSError:  # the worker has ended, which the fork server reports
                return
