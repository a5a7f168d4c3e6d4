"""How the ranks of a job come together: each connects to rank 0, whose address it finds in the store.

Rank 0 listens at a Unix socket for the ranks of its own host, and at its address for those of other hosts. A token,
told through the store, keeps others out.
"""

import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from rankless.collectives.call_signature import format_ranks
from rankless.collectives.shared_memory import host_identity
from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.connections import Closed, Link
from rankless.compat.horovod.engine.messages import (
    Hello,
    Welcome,
    decode_from_coordinator,
    decode_from_rank,
    encode,
)
from rankless.errors import JoinError

TELL_AFTER_SECONDS = 5.0
HELLO_SECONDS = 10.0
NAP_SECONDS = 0.001
LONGEST_NAP_SECONDS = 0.02


@dataclass(frozen=True)
class Met:
    """The ranks of a job: on which host each runs, and the links; rank 0's to all, the others' to rank 0."""

    links: Mapping[int, Link]
    hosts: tuple[str, ...]


def meet(store: Any, *, rank: int, size: int, address: str, timeout_seconds: float) -> Met:
    """Meet at a store. Raises HorovodInternalError that names who has not come in time."""
    host = host_identity()
    if size == 1:
        return Met({}, (host,))
    store.set(f"host/{rank}", host)
    patience = _Patience(store, timeout_seconds)
    if rank == 0:
        hosts = tuple(patience.get(f"host/{other}", other) for other in range(size))
        return _receive(store, hosts, address, patience)
    place = json.loads(patience.get("coordinator", 0))
    return _visit(place, rank, host, patience)


class _Patience:
    """Waits for what ranks put into the store; tells, every few seconds, for whom."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._start = self._told = time.monotonic()
        self._nap = NAP_SECONDS

    def get(self, key: str, rank: int) -> str:
        """What is under a key, which a rank sets."""
        while not self._store.check([key]):
            self.wait(f"rank {rank}")
        return bytes(self._store.get(key)).decode()

    def wait(self, whom: str) -> None:
        """Nap. Raises HorovodInternalError when the time is over."""
        now = time.monotonic()
        if now - self._start > self._seconds:
            error = JoinError(
                expected="every process of the job to call hvd.init()",
                found=f"{whom} did not come within {self._seconds:.0f} s",
                fix="look at what it does instead: its log, or py-spy dump --pid; HOROVOD_START_TIMEOUT waits longer",
            )
            raise HorovodInternalError(f"hvd.init: {error}")
        if now - self._told > TELL_AFTER_SECONDS:
            self._told = now
            print(f"rankless: hvd.init: waiting for {whom}, {now - self._start:.0f} s", file=sys.stderr, flush=True)
        self._store.check(["host/0"])  # raises once the round of an elastic job is over, and its store closed
        time.sleep(self._nap)
        self._nap = min(self._nap * 1.5, LONGEST_NAP_SECONDS)


def _receive(store: Any, hosts: tuple[str, ...], address: str, patience: _Patience) -> Met:
    token = secrets.token_hex(16)
    local = socket.socket(socket.AF_UNIX)
    local.bind(f"\0rankless-horovod-{secrets.token_hex(8)}")
    local.listen(1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    distant = socket.create_server((address, 0), family=family, backlog=1024)
    listening = (local, distant)
    name = local.getsockname()[1:].decode()
    place = {"token": token, "local": name, "address": address, "port": distant.getsockname()[1]}
    for each in listening:
        each.setblocking(False)
    store.set("coordinator", json.dumps(place))
    links: dict[int, Link] = {}
    arriving: list[tuple[Link, float]] = []
    process_ids = [0] * len(hosts)
    while len(links) < len(hosts) - 1:
        for each in listening:
            with suppress(BlockingIOError):
                arriving.append((Link(each.accept()[0]), time.monotonic()))
        for link, since in list(arriving):
            hello = _hello(link, token)
            if hello is not None:
                links[hello.rank] = link
                process_ids[hello.rank] = hello.process_id
            if hello is not None or link.is_closed or time.monotonic() - since > HELLO_SECONDS:
                arriving.remove((link, since))
        missing = [rank for rank in range(1, len(hosts)) if rank not in links]
        if missing:
            patience.wait(format_ranks(missing))
    for each in listening:
        each.close()
    welcome = encode(Welcome(hosts, tuple(process_ids)))
    for link in links.values():
        with suppress(Closed):  # who has gone by now is missed at the first operation
            link.send(welcome)
    return Met(links, hosts)


def _hello(link: Link, token: str) -> Hello | None:
    """Who has connected, if it has said so and has the token."""
    try:
        for said, _ in link.receive():
            hello = decode_from_rank(said)
            if isinstance(hello, Hello) and hmac.compare_digest(hello.token, token):
                return hello
            link.close()
            link.is_closed = True
    except (Closed, msgspec.DecodeError):
        link.is_closed = True
    return None


def _visit(place: dict[str, Any], rank: int, host: str, patience: _Patience) -> Met:
    link = Link(_connected(place, patience))
    hello: bytes | None = encode(Hello(rank=rank, token=place["token"], host=host, process_id=os.getpid()))
    while True:
        try:
            if hello is not None:
                link.send(hello)
            hello = None
            for said, _ in link.receive():
                welcome = decode_from_coordinator(said)
                if isinstance(welcome, Welcome):
                    return Met({0: link}, welcome.hosts)
        except Closed:
            error = JoinError(
                expected="rank 0 to stay until all ranks have come",
                found="it closed the connection",
                fix="look at rank 0's log: it has failed, or been told to end",
            )
            raise HorovodInternalError(f"hvd.init: {error}") from None
        patience.wait("the other ranks")


def _connected(place: dict[str, Any], patience: _Patience) -> socket.socket:
    local = socket.socket(socket.AF_UNIX)
    try:
        local.connect("\0" + place["local"])
        return local
    except OSError:
        local.close()
    while True:
        with suppress(OSError):
            return socket.create_connection((place["address"], place["port"]), timeout=TELL_AFTER_SECONDS)
        patience.wait(f"rank 0 at {place['address']}:{place['port']}")
