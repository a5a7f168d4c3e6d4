"""The messages between the workers of an elastic job and its driver: two tagged unions.

Note [rounds]: workers leave and join, so an elastic job is a sequence of rounds, numbered from 1. In a round the
members and their ranks are fixed. A round ends as soon as one member leaves it. The workers that are ready, or become
ready in time, form the next round. Only the driver decides which workers are in a round, and it chooses only workers
that have reported that they are ready. So no worker waits for one that has continued without it, and a late worker
joins the next round.
"""

import socket
from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec

from rankless.records.encoding import encode_msgpack


class RankAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a rank in its job, or in a round of it: among all ranks, on its host, and across hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    """The index of its host among the hosts that have a worker with its local rank."""
    cross_size: int


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="worker_ready"):
    """A worker is in no round, and waits for the next."""

    last_round: int = 0
    """The last round of this worker; 0 if there was none."""
    has_state: bool = False
    """Whether the worker has the state that all ranks of its last round have, so it needs no broadcast."""
    progress: int = 0
    """How many operations of the script have counted for it."""


class StateSynced(msgspec.Struct, frozen=True, kw_only=True, tag="state_synced"):
    """A worker has the job's state, as all ranks of the round have."""

    round: int


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True, tag="round_started"):
    """A round starts."""

    round: int
    assignment: RankAssignment
    address: str = ""
    """The address of rank 0's host."""
    store: tuple[str, int] | None = None
    """Where the member reaches the store of the round; None if its configuration says it."""
    interface: str | None = None
    """The network interface by which the members reach each other. None does not change it."""
    must_sync: bool = True
    """Whether some member lacks the state of the others. All members then take part in the broadcast."""


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True, tag="round_ended"):
    """A member has left a round, or its process has ended: collectives in the round can no longer complete."""

    round: int


class HostsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="hosts_changed"):
    """The members of a round should leave it at their next commit, because workers are removed or added."""

    round: int
    removed: bool
    added: bool


class WorkerDismissed(msgspec.Struct, frozen=True, kw_only=True, tag="worker_dismissed"):
    """The job has no slot for this worker any more. The worker ends with exit code 0."""


class ReplacementWanted(msgspec.Struct, frozen=True, kw_only=True, tag="replacement_wanted"):
    """A worker that waits for a round is to fork a process that takes the place of a lost one."""

    lost: int
    """The number of the lost worker."""
    launch: bytes = b""
    """The `WorkerLaunch` of the lost worker, which the agent of its host adds."""
    descriptors: tuple[int, ...] = ()
    """The new worker's end of its channel, and its status page if it has one: descriptors of the receiver."""


class ReplacementEnded(msgspec.Struct, frozen=True, kw_only=True, tag="replacement_ended"):
    """A worker has forked a process for a lost one, or has not."""

    lost: int
    process_id: int | None = None
    reason: str = ""
    """Why there is no process."""


WorkerMessage = WorkerReady | StateSynced | ReplacementEnded
"""From a worker to the driver."""
DriverMessage = RoundStarted | RoundEnded | HostsChanged | WorkerDismissed | ReplacementWanted
"""From the driver to a worker."""

_MAX_MESSAGE_BYTES = 1 << 18
_SOCKET_TYPE = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)


def open_message_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel, which keeps the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, _SOCKET_TYPE)


def send_message(
    end: socket.socket, message: WorkerMessage | DriverMessage, *, descriptors: Sequence[int] = ()
) -> None:
    """Send one message, with descriptors for the process that receives it. Raises `OSError` if it is gone."""
    socket.send_fds(end, [encode_msgpack(message)], list(descriptors))


def receive_driver_message(end: socket.socket) -> DriverMessage | None:
    """Return the driver's next message, or None once the driver is gone. Blocks as `end` does."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(end, _MAX_MESSAGE_BYTES, 2)
    except ConnectionError:
        return None
    message = msgspec.msgpack.decode(data, type=DriverMessage) if data else None
    if isinstance(message, ReplacementWanted):
        return msgspec.structs.replace(message, descriptors=tuple(descriptors))
    return message


def receive_worker_message(end: socket.socket) -> WorkerMessage | None:
    """Return a worker's next message, or None once the worker is gone.

    Raises `BlockingIOError` if there is none yet, and `MsgspecError` for data that is no message.
    """
    try:
        data = end.recv(_MAX_MESSAGE_BYTES)
    except ConnectionError:
        return None
    return msgspec.msgpack.decode(data, type=WorkerMessage) if data else None


def assign_ranks(hosts: Sequence[Hashable]) -> list[RankAssignment]:
    """Return the assignment of every rank. `hosts` has each rank's host, in the order of ranks."""
    sizes = Counter(hosts)
    # For each local rank: the hosts that have a rank of that number, each with its index among them.
    peers = [
        {host: index for index, host in enumerate(host for host in sizes if sizes[host] > local_rank)}
        for local_rank in range(max(sizes.values()))
    ]
    assigned: Counter[Hashable] = Counter()
    found = []
    for rank, host in enumerate(hosts):
        local_rank = assigned[host]
        assigned[host] += 1
        found.append(
            RankAssignment(
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=sizes[host],
                cross_rank=peers[local_rank][host],
                cross_size=len(peers[local_rank]),
            )
        )
    return found
