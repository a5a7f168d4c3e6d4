"""What an elastic job's workers and their driver say to each other, as two tagged unions.

Note [rounds]: workers come and go, so an elastic job is a row of rounds, numbered from 1. In a round the members and
their ranks are fixed. A round is over as soon as one member has left it; then who is ready, or comes in time, makes the
next one. The driver alone decides who is in a round, and only of workers that have said that they are ready: so no
worker waits for another that has gone on without it, and who comes late is in the next round.
"""

import socket

import msgspec


class RankAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands in its job, or in a round of it: among all, on its host, and its host among others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    """Of its host, among the hosts that have a worker with its local rank."""
    cross_size: int


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A worker is in no round, and waits for the next."""

    last_round: int = 0
    """In which it was last; 0: in none."""
    has_state: bool = False
    """Its state is that of all ranks of its last round, so it need not be sent to it again."""


class StoreReady(msgspec.Struct, frozen=True, kw_only=True, tag="serving"):
    """Rank 0 serves the round's store at this port."""

    round: int
    port: int


class StateSynced(msgspec.Struct, frozen=True, kw_only=True, tag="synced"):
    """A worker has the state of the job, as all ranks of the round have."""

    round: int


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """A round begins. To rank 0 without a port: it opens the store on this address, and says where."""

    round: int
    assignment: RankAssignment
    address: str = ""
    """Of rank 0's host."""
    port: int | None = None
    interface: str | None = None
    """The network card by which the members reach each other; None leaves it as it is."""
    must_sync: bool = True
    """Some member has not the state that the others have: all take part in sending it."""


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """A member has left a round, or its process has ended: nobody can come together in it any more."""

    round: int


class HostsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="hosts_changed"):
    """Members of a round should leave it at their next commit, because workers are to go, or have come."""

    round: int
    removed: bool
    added: bool


class WorkerDismissed(msgspec.Struct, frozen=True, kw_only=True, tag="dismissed"):
    """There is no place for this worker any more: it ends, with 0."""


WorkerMessage = WorkerReady | StoreReady | StateSynced
DriverMessage = RoundStarted | RoundEnded | HostsChanged | WorkerDismissed

_LONGEST = 1 << 16
_KIND = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)


def open_message_channel() -> tuple[socket.socket, socket.socket]:
    """Two ends over which single words travel."""
    return socket.socketpair(socket.AF_UNIX, _KIND)


def send_message(end: socket.socket, word: WorkerMessage | DriverMessage) -> None:
    """Send one word. Raises OSError if nobody hears."""
    end.send(msgspec.msgpack.encode(word))


def receive_driver_message(end: socket.socket) -> DriverMessage | None:
    """What the driver says next; None once it is gone. Blocks as `end` does."""
    try:
        data = end.recv(_LONGEST)
    except ConnectionError:
        return None
    return msgspec.msgpack.decode(data, type=DriverMessage) if data else None


def receive_worker_message(end: socket.socket) -> WorkerMessage | None:
    """What a worker says next; None once it is gone. Raises BlockingIOError, and MsgspecError for rubbish."""
    try:
        data = end.recv(_LONGEST)
    except ConnectionError:
        return None
    return msgspec.msgpack.decode(data, type=WorkerMessage) if data else None
