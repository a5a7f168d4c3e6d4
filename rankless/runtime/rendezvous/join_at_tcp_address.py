"""Rendezvous at a TCP address: rank 0 serves a store there, every rank registers, and all wait for all.

Note [the store listens on one address]: torch's store listens on all interfaces, whatever its address says, and accepts
any connection. So rank 0 opens the socket itself, on the given address, and passes it to the store.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from rankless.collectives.shared_memory_file import host_identity
from rankless.config.hosts_and_addresses import listen_on
from rankless.errors import JoinError
from rankless.records.number_formatting import format_ranks
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters

NOTICE_AFTER_SECONDS = 5.0
POLL_SECONDS = 0.02
MAX_LISTEN_ATTEMPTS = 50
CONNECT_TIMEOUT_SECONDS = 5.0

Notify = Callable[[str], None]


class Participant(msgspec.Struct, frozen=True):
    """What a rank registers at the rendezvous."""

    host: str
    process_id: int
    world_size: int


class CompletedRendezvous:
    """A complete rendezvous: the store that all ranks share, and the participants by rank."""

    def __init__(self, store: Any, participants: Sequence[Participant]) -> None:
        self.store = store
        self.participants = tuple(participants)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks run on the same host."""
        return len({one.host for one in self.participants}) == 1

    def local_rank(self, rank: int) -> int:
        """Return a rank's number among the ranks of its host."""
        return sum(one.host == self.participants[rank].host for one in self.participants[:rank])


class JoinDeadline:
    """Polls until a timeout, and notifies the user every few seconds what this rank waits for."""

    def __init__(self, parameters: RendezvousParameters, notify: Notify) -> None:
        self._timeout_seconds = parameters.timeout_seconds
        self._notify = notify
        self._start = self._notified = time.monotonic()

    def wait(self, describe: Callable[[], str], fix: str) -> None:
        """Sleep for one poll interval. Raises JoinError, with `describe()` and `fix`, after the timeout."""
        now = time.monotonic()
        if now - self._start > self._timeout_seconds:
            raise JoinError(expected="all ranks to join", found=f"{describe()}, for {now - self._start:.1f} s", fix=fix)
        if now - self._notified > NOTICE_AFTER_SECONDS:
            self._notified = now
            self._notify(f"{describe()}, {now - self._start:.0f} s")
        time.sleep(POLL_SECONDS)


def join_tcp_rendezvous(parameters: RendezvousParameters, notify: Notify) -> CompletedRendezvous:
    """Join the other ranks at a tcp:// address. Raises JoinError."""
    deadline = JoinDeadline(parameters, notify)
    while True:
        # A process may join, shut down and join again. A launcher's store counts the times. At rank 0's own store the
        # process may still reach the store of the previous time, which is about to close.
        with contextlib.suppress(dist.DistError):
            store = _open_store(parameters, deadline)
            join_count = store.add(f"rankless/times/{parameters.rank}", 1)
            if parameters.served_by_launcher or join_count == 1:
                store.set_timeout(timedelta(seconds=parameters.timeout_seconds))
                return _wait_for_all(store, f"rankless/rendezvous/{join_count}", parameters, deadline)
            if not store.check(["rankless/complete"]):
                raise JoinError(
                    expected=f"one process as rank {parameters.rank} at {parameters}",
                    found="a second one: another process has joined as this rank before",
                    fix="give every process a rank of its own, or end the remaining processes of an earlier run",
                )
        store = None
        deadline.wait(lambda: f"{parameters}: waiting for an earlier store to close", "call shutdown on every rank")


def _wait_for_all(
    store: Any, prefix: str, parameters: RendezvousParameters, deadline: JoinDeadline
) -> CompletedRendezvous:
    rank, size = parameters.rank, parameters.world_size
    own = Participant(host_identity(), os.getpid(), size)
    store.set(f"{prefix}/{rank}", msgspec.json.encode(own))
    found: dict[int, Participant] = {}

    while len(found) < size:
        for other in range(size):
            if other not in found and store.check([f"{prefix}/{other}"]):
                found[other] = msgspec.json.decode(store.get(f"{prefix}/{other}"), type=Participant)
                _require_same_size(found[other], other, parameters)
        if len(found) < size:
            deadline.wait(
                lambda: describe_missing_ranks(parameters, found),
                "start the others, with the same address and world_size",
            )
    store.set("rankless/complete", "")
    # A launcher's store still has the keys of an earlier group.
    own_store = dist.PrefixStore(f"{prefix}/group", store)  # type: ignore[attr-defined]  # missing in the stubs
    return CompletedRendezvous(own_store, [found[other] for other in range(size)])


def describe_missing_ranks(parameters: RendezvousParameters, found: Collection[int]) -> str:
    """Return a text that names the ranks for which a rendezvous waits."""
    missing = [rank for rank in range(parameters.world_size) if rank not in found]
    return f"{parameters}: waiting for {format_ranks(missing)} of {parameters.world_size}"


def _require_same_size(other: Participant, rank: int, parameters: RendezvousParameters) -> None:
    if other.world_size != parameters.world_size:
        raise JoinError(
            expected=f"all ranks with world_size={parameters.world_size}, as here on rank {parameters.rank}",
            found=f"world_size={other.world_size} on rank {rank}",
            fix="start all processes with the same number",
        )


def _open_store(parameters: RendezvousParameters, deadline: JoinDeadline) -> Any:
    """Return the store at the address. Rank 0 serves it; the other ranks wait until they can reach it."""
    serves = parameters.rank == 0 and not parameters.served_by_launcher
    listening = _listen(parameters) if serves else None
    if not serves:
        _wait_until_reachable(parameters, deadline)
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        parameters.host,
        parameters.port,
        parameters.world_size,
        serves,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _listen(parameters: RendezvousParameters) -> int:
    for attempt in range(MAX_LISTEN_ATTEMPTS):
        try:
            return listen_on(parameters.host, parameters.port).detach()
        except OSError as error:
            # The store of an earlier rendezvous of this process may take a moment to close.
            if attempt + 1 == MAX_LISTEN_ATTEMPTS or "in use" not in str(error):
                raise JoinError(
                    expected=f"rank 0 to listen on {parameters.host}, port {parameters.port}",
                    found=str(error),
                    fix="use an address of rank 0's own host and a free port: `ss -ltnp` shows which process has it",
                ) from None
            time.sleep(POLL_SECONDS)
    raise AssertionError("the loop returns or raises")


def _wait_until_reachable(parameters: RendezvousParameters, deadline: JoinDeadline) -> None:
    why = ""

    def describe() -> str:
        return f"{parameters}: waiting for rank 0, which serves there ({why})"

    while True:
        try:
            socket.create_connection((parameters.host, parameters.port), timeout=2.0).close()
            return
        except socket.gaierror as error:
            raise JoinError(
                expected=f"a host name that can be resolved: {parameters.host}",
                found=str(error),
                fix="use an IP address, or add the name to /etc/hosts",
            ) from None
        except TimeoutError:
            why = "no answer: a firewall, or another network?"
        except OSError as error:
            why = error.strerror or str(error)
        deadline.wait(describe, "start rank 0 on that host first; check that the port is open and the address rank 0's")
