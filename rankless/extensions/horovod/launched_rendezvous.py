"""Rendezvous of processes that Horovod's own launcher has started, through its HTTP key-value server.

That server answers PUT and GET of /scope/key, and 404 for a key that has no value. Rank 0 publishes the address of its
store under one key, for a moment. The ranks then join at that store, as everywhere.

Note [rank 0 clears the key first]: a process may join again, and a shell may run a second program in the same job. So
rank 0 clears its address before any rank continues. It writes an empty value: older servers of Horovod fail on DELETE
in a scope that they do not know.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.client import HTTPConnection, HTTPException

import msgspec
import torch.distributed as dist

from rankless.config import environment
from rankless.config.hosts_and_addresses import interface_towards
from rankless.errors import JoinError
from rankless.extensions.horovodrun.launched_worker import HorovodWorker
from rankless.records.elastic_driver_protocol import assign_ranks
from rankless.runtime.rendezvous.find_rendezvous import RendezvousInfo
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters
from rankless.runtime.rendezvous.join_at_tcp_address import (
    CompletedRendezvous,
    JoinDeadline,
    Notify,
    join_tcp_rendezvous,
)

PATH = "/rankless/rendezvous"
CLEARED_KEY = "rankless/cleared"
REQUEST_TIMEOUT_SECONDS = 5.0
SERVER_TIMEOUT_SECONDS = 30.0
"""How long the server may fail to answer. The launcher starts it before any worker."""
MAX_POLL_SECONDS = 0.25


class StoreAddress(msgspec.Struct, frozen=True):
    """The address at which rank 0 serves the store of the job."""

    host: str
    port: int


def join(worker: HorovodWorker, notify: Notify) -> RendezvousInfo:
    """Join the other ranks of a job that Horovod's own launcher has started. Raises JoinError."""
    if worker.world_size == 1:
        return RendezvousInfo(rank=0, size=1, store=dist.HashStore(), assignment=worker.assignment)  # type: ignore[attr-defined]  # missing in the stubs
    rendezvous, address = join_horovod_rendezvous(worker, notify)
    environment.prefer_interface(worker.interface or interface_towards(worker.address)[0])
    hosts = [one.host for one in rendezvous.participants]
    return RendezvousInfo(
        rank=worker.rank,
        size=worker.world_size,
        store=rendezvous.store,
        address=address.host,
        assignment=worker.assignment or assign_ranks(hosts)[worker.rank],
    )


def join_horovod_rendezvous(worker: HorovodWorker, notify: Notify) -> tuple[CompletedRendezvous, StoreAddress]:
    """Join the other ranks. Return the rendezvous and the address of its store. Raises JoinError."""
    key_value_client = KeyValueClient(worker, notify)
    if worker.rank != 0:
        address = _receive_store_address(key_value_client)
        rendezvous = join_tcp_rendezvous(_make_parameters(worker, address), notify)
        rendezvous.store.wait([CLEARED_KEY], timedelta(seconds=worker.timeout_seconds))
        return rendezvous, address
    with _reserve_port(key_value_client.own_address()) as address:
        key_value_client.put(msgspec.json.encode(address))
        rendezvous = join_tcp_rendezvous(_make_parameters(worker, address), notify)
    key_value_client.put(b"")
    rendezvous.store.set(CLEARED_KEY, "")
    return rendezvous, address


class KeyValueClient:
    """A worker's client of the launcher's server, for one value."""

    def __init__(self, worker: HorovodWorker, notify: Notify) -> None:
        self._worker = worker
        host = f"[{worker.address}]" if ":" in worker.address else worker.address
        self._name = f"http://{host}:{worker.port}"
        self._deadline = JoinDeadline(_make_parameters(worker, StoreAddress(worker.address, worker.port)), notify)
        self._poll_seconds = 0.0

    def own_address(self) -> str:
        """Return this host's address on the route to the server, which all ranks can reach. Raises JoinError."""
        try:
            return interface_towards(self._worker.address)[1]
        except (OSError, UnicodeError) as error:
            raise self._make_unreachable_error(str(error)) from None

    def put(self, value: bytes) -> None:
        """Set the value that the other ranks get. Raises JoinError."""
        self._request("PUT", value)

    def get(self) -> bytes:
        """Return the value, empty if there is none. Raises JoinError."""
        return self._request("GET", None)

    def wait_for_rank_0(self) -> None:
        """Sleep between two polls. Raises JoinError after the timeout."""
        self._deadline.wait(
            lambda: f"{self._name}: waiting for rank 0, which publishes its address there",
            "check that rank 0 calls hvd.init, with the same version of Rankless; HOROVOD_START_TIMEOUT waits longer",
        )
        time.sleep(self._poll_seconds)  # in addition to the deadline's own: a thousand ranks may poll one server
        self._poll_seconds = min(self._poll_seconds + 0.01, MAX_POLL_SECONDS)

    def _request(self, method: str, body: bytes | None) -> bytes:
        start = time.monotonic()
        while True:
            try:
                return self._request_once(method, body)
            except (socket.gaierror, UnicodeError) as error:
                raise self._make_unreachable_error(str(error)) from None
            except (OSError, HTTPException) as error:
                why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            if time.monotonic() - start > min(SERVER_TIMEOUT_SECONDS, self._worker.timeout_seconds):
                raise self._make_unreachable_error(why)
            try:
                self._deadline.wait(self._describe_no_answer(why), self._fix())
            except JoinError:  # the time for joining has passed: the server is the cause, not a rank
                raise self._make_unreachable_error(why) from None

    def _request_once(self, method: str, body: bytes | None) -> bytes:
        connection = HTTPConnection(self._worker.address, self._worker.port, timeout=REQUEST_TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, PATH, body)
            answer = connection.getresponse()
            value = answer.read()
        if answer.status not in (200, 404):
            raise HTTPException(f"it says {answer.status} {answer.reason}")
        return value if answer.status == 200 else b""

    def _describe_no_answer(self, why: str) -> Callable[[], str]:
        return lambda: f"{self._name}: no answer ({why})"

    def _make_unreachable_error(self, why: str) -> JoinError:
        return JoinError(
            expected=f"Horovod's launcher to answer at {self._name}, as HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT say",
            found=why,
            fix=self._fix(),
        )

    def _fix(self) -> str:
        return (
            "check that the launcher is alive and its port open to this host; or start the job by "
            "`rankless horovodrun`, with the same options"
        )


def _receive_store_address(key_value_client: KeyValueClient) -> StoreAddress:
    while not (value := key_value_client.get()):
        key_value_client.wait_for_rank_0()
    try:
        return msgspec.json.decode(value, type=StoreAddress)
    except msgspec.DecodeError:
        raise JoinError(
            expected=f"rank 0's host and port at {PATH} of Horovod's server",
            found=repr(value[:80]),
            fix="stop what else writes there; use the same version of Rankless on all ranks",
        ) from None


@contextlib.contextmanager
def _reserve_port(host: str) -> Iterator[StoreAddress]:
    """Reserve a port for the store: the socket is bound, so that no other process gets it, and does not listen yet."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        yield StoreAddress(host, reserved.getsockname()[1])


def _make_parameters(worker: HorovodWorker, address: StoreAddress) -> RendezvousParameters:
    return RendezvousParameters(
        kind="tcp",
        host=address.host,
        port=address.port,
        rank=worker.rank,
        world_size=worker.world_size,
        timeout_seconds=worker.timeout_seconds,
    )
