"""Meeting at an address: rank 0 serves a store there, every rank leaves its name, and all wait until all are there.

Note [the store listens where it is told]: torch's store listens on all interfaces, whatever its address says, and lets
anybody in. So rank 0 opens the socket itself, on the address given, and hands it over.
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

from rankless.collectives.call_signature import format_ranks
from rankless.collectives.shared_memory import host_identity
from rankless.errors import JoinError
from rankless.runtime.rendezvous.address import RendezvousParameters

TELL_AFTER_SECONDS = 5.0
NAP_SECONDS = 0.02
TRIES_TO_LISTEN = 50
CONNECT_SECONDS = 5.0

Notify = Callable[[str], None]


class Participant(msgspec.Struct, frozen=True):
    """What a rank leaves at the meeting."""

    host: str
    process_id: int
    world_size: int


class Rendezvous:
    """The store at which all ranks have met, and what each has told of itself."""

    def __init__(self, store: Any, arrived: Sequence[Participant]) -> None:
        self.store = store
        self.arrived = tuple(arrived)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are."""
        return len({one.host for one in self.arrived}) == 1

    def local_rank(self, rank: int) -> int:
        """A rank's number among those of its host."""
        return sum(one.host == self.arrived[rank].host for one in self.arrived[:rank])


class JoinDeadline:
    """Waiting with a limit that tells, every few seconds, what for."""

    def __init__(self, parameters: RendezvousParameters, notify: Notify) -> None:
        self._limit = parameters.timeout_seconds
        self._notify = notify
        self._start = self._told = time.monotonic()

    def wait(self, waiting_for: Callable[[], str], fix: str) -> None:
        """Nap. Raises JoinError when the time is over."""
        now = time.monotonic()
        if now - self._start > self._limit:
            raise JoinError(
                expected="all ranks to come", found=f"{waiting_for()}, for {now - self._start:.1f} s", fix=fix
            )
        if now - self._told > TELL_AFTER_SECONDS:
            self._told = now
            self._notify(f"{waiting_for()}, {now - self._start:.0f} s")
        time.sleep(NAP_SECONDS)


def join_tcp_rendezvous(parameters: RendezvousParameters, notify: Notify) -> Rendezvous:
    """Meet at a tcp:// address. Raises JoinError."""
    deadline = JoinDeadline(parameters, notify)
    while True:
        # A process may join, shut down, and join again: at a launcher's store under another number each time, and
        # at rank 0's it may come upon the store of the time before, which is about to go.
        with contextlib.suppress(dist.DistError):
            store = _store_at(parameters, deadline)
            time_joined = store.add(f"rankless/times/{parameters.rank}", 1)
            if parameters.served or time_joined == 1:
                store.set_timeout(timedelta(seconds=parameters.timeout_seconds))
                return _all_arrived(store, f"rankless/meeting/{time_joined}", parameters, deadline)
            if not store.check(["rankless/complete"]):
                raise JoinError(
                    expected=f"one process as rank {parameters.rank} at {parameters}",
                    found="another that came before",
                    fix="give every process a rank of its own, or end what is left of an earlier run",
                )
        store = None
        deadline.wait(lambda: f"{parameters}: waiting for an earlier store to close", "call shutdown on every rank")


def _all_arrived(store: Any, prefix: str, parameters: RendezvousParameters, deadline: JoinDeadline) -> Rendezvous:
    rank, size = parameters.rank, parameters.world_size
    own = Participant(host_identity(), os.getpid(), size)
    store.set(f"{prefix}/{rank}", msgspec.json.encode(own))
    arrived: dict[int, Participant] = {}

    while len(arrived) < size:
        for other in range(size):
            if other not in arrived and store.check([f"{prefix}/{other}"]):
                arrived[other] = msgspec.json.decode(store.get(f"{prefix}/{other}"), type=Participant)
                _require_one_size(arrived[other], other, parameters)
        if len(arrived) < size:
            deadline.wait(
                lambda: waiting_text(parameters, arrived), "start the others, with the same address and world_size"
            )
    store.set("rankless/complete", "")
    # At a launcher's store the keys of an earlier group are still there.
    own_store = dist.PrefixStore(f"{prefix}/group", store)  # type: ignore[attr-defined]  # missing in the stubs
    return Rendezvous(own_store, [arrived[other] for other in range(size)])


def waiting_text(parameters: RendezvousParameters, arrived: Collection[int]) -> str:
    """For which ranks a meeting waits, in words."""
    missing = [rank for rank in range(parameters.world_size) if rank not in arrived]
    return f"{parameters}: waiting for {format_ranks(missing)} of {parameters.world_size}"


def _require_one_size(other: Participant, rank: int, parameters: RendezvousParameters) -> None:
    if other.world_size != parameters.world_size:
        raise JoinError(
            expected=f"all ranks with world_size={parameters.world_size}, as here on rank {parameters.rank}",
            found=f"world_size={other.world_size} on rank {rank}",
            fix="start all processes with the same number",
        )


def _store_at(parameters: RendezvousParameters, deadline: JoinDeadline) -> Any:
    """The store at the address: served by rank 0, of which the others wait until it is there."""
    serves = parameters.rank == 0 and not parameters.served
    listening = _listening(parameters) if serves else None
    if not serves:
        _until_reachable(parameters, deadline)
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        parameters.host,
        parameters.port,
        parameters.world_size,
        serves,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _listening(parameters: RendezvousParameters) -> int:
    family = socket.AF_INET6 if ":" in parameters.host else socket.AF_INET
    for attempt in range(TRIES_TO_LISTEN):
        try:
            return socket.create_server((parameters.host, parameters.port), family=family, backlog=1024).detach()
        except OSError as error:
            # The store of an earlier meeting of this process may need a moment to close.
            if attempt + 1 == TRIES_TO_LISTEN or "in use" not in str(error):
                raise JoinError(
                    expected=f"rank 0 to listen on {parameters.host}, port {parameters.port}",
                    found=str(error),
                    fix="name an address of rank 0's own host, and a port that is free: `ss -ltnp` shows who has it",
                ) from None
            time.sleep(NAP_SECONDS)
    raise AssertionError("the loop returns or raises")


def _until_reachable(parameters: RendezvousParameters, deadline: JoinDeadline) -> None:
    why = ""

    def waiting_for() -> str:
        return f"{parameters}: waiting for rank 0, which serves there ({why})"

    while True:
        try:
            socket.create_connection((parameters.host, parameters.port), timeout=2.0).close()
            return
        except socket.gaierror as error:
            raise JoinError(
                expected=f"a host name that can be looked up: {parameters.host}",
                found=str(error),
                fix="name an IP address, or add the name to /etc/hosts",
            ) from None
        except TimeoutError:
            why = "no answer: a firewall, or another network?"
        except OSError as error:
            why = error.strerror or str(error)
        deadline.wait(waiting_for, "start rank 0 on that host first; is the port open, and the address rank 0's?")
