"""Before the start, the hosts of a job try the ports that the ranks need: MASTER_PORT, the store's, and free ones.

The agents already reach host 0 at the job's port. A firewall may still drop everything else, and then the ranks would
wait for each other until PyTorch's timeout. So every host listens on a free port, as Gloo and NCCL do, and connects to
the others. Host 0 evaluates the outcomes.
"""

import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.environment import PORT_TEST, user_interfaces
from rankless.config.hosts_and_addresses import Endpoint, address_family
from rankless.errors import JoinError
from rankless.launch.rendezvous.connect_and_measure import SECRET_BYTES, connect_all, start_listener, stop_listener
from rankless.launch.rendezvous.control_server import (
    ANSWER_TIMEOUT_SECONDS,
    ControlServer,
    announced_failures,
    receive_answers,
)
from rankless.launch.rendezvous.messages import (
    ConnectToPorts,
    ControlMessage,
    OpenPort,
    PortOpened,
    PortsTried,
)
from rankless.launch.signal_reader import Interrupts
from rankless.records.host_connection_tests import ConnectionAttempt, ConnectionTarget, UsedPort

CONNECT_TIMEOUT_SECONDS = 5.0
"""For one connection: the kernel repeats its first packet after 1 and 3 s."""
MAX_TARGETS = 64
"""Other hosts that one host tries. With more hosts, each tries the next ones in the list, and host 0."""
_MAX_LISTED = 4

_Answer = TypeVar("_Answer", PortOpened, PortsTried)


class PortTester:
    """One host's part in the test: it listens, and connects to others in the background.

    Args:
        address: This host's address on its route to host 0. The test uses it unless the user has named an interface
            for Gloo.
    """

    def __init__(self, address: str) -> None:
        self._address = _gloo_address(address)
        self._host_index = 0
        self._secret = b""
        self._listeners: list[socket.socket] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="port test")
        self._attempts: Future[tuple[ConnectionAttempt, ...]] | None = None

    def receive(self, message: ControlMessage) -> PortOpened | None:
        """Carry out a request of host 0, and return what to answer at once. Ignore other messages."""
        if isinstance(message, ConnectToPorts):
            self._attempts = self._pool.submit(
                connect_all, message.targets, self._secret, timeout_seconds=CONNECT_TIMEOUT_SECONDS
            )
        elif isinstance(message, OpenPort):
            self._host_index, self._secret = message.host_index, message.secret
            for address, port in message.ports:
                self.listen(address, port)
            return PortOpened(address=self._address, port=self.listen(self._address))
        return None

    def listen(self, address: str, port: int = 0) -> int:
        """Listen on a port of this host, by default a free one. Return its number, or 0 if it cannot be had."""
        listener = start_listener(self._host_index, self._secret, port, address)
        if listener is None:
            return 0
        self._listeners.append(listener)
        return int(listener.getsockname()[1])

    def take_result(self) -> PortsTried | None:
        """Return the outcomes once, when all connections have been tried."""
        if self._attempts is None or not self._attempts.done():
            return None
        attempts, self._attempts = self._attempts.result(), None
        return PortsTried(attempts=attempts)

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            stop_listener(listener)
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class PortTest:
    """What host 0 tests."""

    names: Sequence[str]
    """The name of every host."""
    address: str
    """Host 0's address, which is MASTER_ADDR."""
    control_port: int
    """The port at which all hosts reach host 0's agent."""
    master_port: int
    store: socket.socket
    """The listening socket on which rank 0 will serve the store."""
    workers: Sequence[int]
    """The number of workers of every host. One without workers needs the ports of its other processes alone."""
    ports: Sequence[UsedPort] = ()
    """Those of processes beside the workers, which do not run yet."""

    @property
    def uses(self) -> Mapping[tuple[int, int], str]:
        """What the ports that are no free ones are for, by host index and port."""
        uses = {(0, self.master_port): "MASTER_PORT", (0, self.store.getsockname()[1]): "the store"}
        return uses | {(each.host_index, each.port): each.use for each in self.ports}

    def ports_of(self, host: int) -> tuple[tuple[str, int], ...]:
        """Return the addresses and ports of a host's processes beside its workers."""
        return tuple((each.address, each.port) for each in self.ports if each.host_index == host)

    def used_targets(self, host: int, opened: Collection[int]) -> tuple[ConnectionTarget, ...]:
        """Return those of the used ports that a host tries: on the other hosts that have opened theirs."""
        return tuple(
            ConnectionTarget(host_index=other, address=address, port=port)
            for other in sorted(set(opened) - {host})
            for address, port in self.ports_of(other)
        )


def run_port_test(
    server: ControlServer, test: PortTest, *, interrupts: Interrupts, notify: Callable[[str], None]
) -> None:
    """Let all hosts try the ports of the ranks. A host that does not answer in time is left out, with a notice.

    Raises:
        JoinError: If a port cannot be reached, or a host leaves. The other hosts receive it too.
        RendezvousInterrupted: On a signal.
    """
    tester = PortTester(test.address)
    conversation = _Conversation(server, tester, test.names, interrupts)
    try:
        with announced_failures(server):
            _check_attempts(test, conversation.run(test))
    finally:
        tester.close()
        _drain(test.store)
    if conversation.late_hosts:
        late = ", ".join(test.names[host] for host in sorted(conversation.late_hosts))
        notify(f"the ports of the ranks were not tried on {late}: no answer within {ANSWER_TIMEOUT_SECONDS:g} s")


class _Conversation:
    """Host 0's requests to all hosts, and their answers."""

    def __init__(self, server: ControlServer, tester: PortTester, names: Sequence[str], interrupts: Interrupts) -> None:
        self._server = server
        self._tester = tester
        self._names = names
        self._interrupts = interrupts
        self.late_hosts: set[int] = set()

    def run(self, test: PortTest) -> dict[int, Sequence[ConnectionAttempt]]:
        """Return the outcomes of each host that has answered."""
        secret = secrets.token_bytes(SECRET_BYTES)
        own = self._tester.receive(OpenPort(secret=secret, host_index=0, ports=test.ports_of(0)))
        assert own is not None
        others = sorted(self._server.connected_hosts)
        for host in others:
            self._server.send(host, OpenPort(secret=secret, host_index=host, ports=test.ports_of(host)))
        opened = {0: own, **self._receive(PortOpened, others)}
        fixed = [
            ConnectionTarget(host_index=0, address=test.address, port=test.store.getsockname()[1], has_probe=False)
        ]
        if self._tester.listen(test.address, test.master_port):
            fixed.append(ConnectionTarget(host_index=0, address=test.address, port=test.master_port))
        ranked = {host: each for host, each in opened.items() if test.workers[host]}
        for host in sorted(ranked.keys() - {0}):
            targets = (*_choose_targets(host, ranked), *fixed, *test.used_targets(host, opened))
            self._server.send(host, ConnectToPorts(targets=targets))
        self._tester.receive(ConnectToPorts(targets=(*_choose_targets(0, ranked), *test.used_targets(0, opened))))
        answers = self._receive(PortsTried, ranked.keys(), self._tester.take_result)
        return {host: answer.attempts for host, answer in answers.items()}

    def _receive(
        self, kind: type[_Answer], hosts: Collection[int], own_answer: Callable[[], _Answer | None] = lambda: None
    ) -> dict[int, _Answer]:
        """Return the answers of these hosts; those that are late go into `late_hosts`."""
        found = receive_answers(
            self._server, (kind,), hosts, names=self._names, interrupts=self._interrupts, own_answer=own_answer
        )
        self.late_hosts |= set(hosts) - found.keys()
        return found


def _choose_targets(host: int, opened: Mapping[int, PortOpened]) -> tuple[ConnectionTarget, ...]:
    """Return the free ports of other hosts that a host tries."""
    hosts = sorted(opened)
    place = hosts.index(host)
    following = [*hosts[place + 1 :], *hosts[:place]]
    chosen = [*following[:MAX_TARGETS], *([0] if 0 in following[MAX_TARGETS:] else [])]
    return tuple(
        ConnectionTarget(host_index=other, address=opened[other].address, port=opened[other].port)
        for other in chosen
        if opened[other].port
    )


def _check_attempts(test: PortTest, attempts: Mapping[int, Sequence[ConnectionAttempt]]) -> None:
    """Raise `JoinError` if a connection failed."""
    failures = [
        (host, attempt)
        for host in sorted(attempts)
        for attempt in attempts[host]
        if attempt.outcome not in ("reached", "silent")
    ]
    if not failures:
        return
    seen = [
        f"{test.names[host]} → {_describe_target(test, attempt.target)}: {_describe_outcome(attempt)}"
        for host, attempt in failures
    ]
    more = f"; and {len(seen) - _MAX_LISTED} more" if len(seen) > _MAX_LISTED else ""
    concerned = sorted({host for source, attempt in failures for host in (source, attempt.target.host_index)})
    names = " and ".join(test.names[host] for host in concerned) if len(concerned) <= _MAX_LISTED else "all hosts"
    raise JoinError(
        expected="ports that the ranks need to be open between the hosts: MASTER_PORT, the store's port, "
        f"{'those of the servers, ' if test.ports else ''}and the free ports that Gloo and NCCL choose",
        found="; ".join(seen[:_MAX_LISTED]) + more,
        fix=f"open all TCP ports between {names}, not only {test.control_port} and ssh's; rankless doctor --hosts "
        f"tests every pair; {PORT_TEST}=0 starts a job whose ranks do not communicate",
    )


def _describe_target(test: PortTest, target: ConnectionTarget) -> str:
    use = test.uses.get((target.host_index, target.port), "a free port")
    name = test.names[target.host_index]
    return f"{'' if name == target.address else f'{name}, '}{Endpoint(target.address, target.port)} ({use})"


def _describe_outcome(attempt: ConnectionAttempt) -> str:
    texts = {
        "dropped": "no answer, so a firewall drops packets",
        "refused": "refused although the agent listens there, so a firewall rejects it",
        "another": "another machine answers there",
    }
    return texts.get(attempt.outcome) or f"{attempt.outcome}: {attempt.text}"


def _gloo_address(address: str) -> str:
    """Return the address on the interface that the user has named for Gloo, by default `address`."""
    interface = user_interfaces().get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    cards = psutil.net_if_addrs().get(interface, ())
    found = [item.address for item in cards if item.family == address_family(address)]
    return found[0].partition("%")[0] if found else address


def _drain(store: socket.socket) -> None:
    """Close the connections that the test has left in the queue of the store's socket."""
    store.setblocking(False)
    with suppress(OSError):
        while True:
            store.accept()[0].close()
    store.setblocking(True)
