"""The control channel accepts only holders of the token, and no frame can be forged or repeated."""

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from rankless.config.run_config import Program
from rankless.launch.rendezvous import messages
from rankless.launch.rendezvous.control_connection import (
    MAX_FRAME_BYTES,
    ConnectionBrokenError,
    ControlConnection,
    LeaderConnection,
    LeaderUnreachableError,
    TokenRejectedError,
    connect_to_leader,
)
from rankless.launch.rendezvous.control_server import (
    ConnectionRejected,
    ControlServer,
    HostDisconnected,
    HostJoined,
    HostReported,
)
from rankless.launch.rendezvous.host_consistency import HostFacts, collect_host_facts, find_differences
from rankless.launch.rendezvous.messages import (
    ClientHello,
    Heartbeat,
    HostEnded,
    JobEnded,
    JoinRefused,
    JoinRequest,
    ServerHello,
    WorkerRecords,
)
from rankless.records.events import ScriptFinished
from rankless.records.unauthenticated_client_limits import HANDSHAKE_SECONDS, MAX_NEW_CLIENTS

TOKEN = secrets.token_bytes(32)
PROGRAM = Program(kind="code", target="print()")


def facts() -> HostFacts:
    return collect_host_facts(PROGRAM, hosts=("a:1", "b:1"), devices=("cpu",))


class Relay:
    """A connection on which a test can read, change, repeat and drop what both sides send."""

    def __init__(self) -> None:
        self.client_end, self.at_client = socket.socketpair()
        self.server_end, self.at_server = socket.socketpair()
        for end in (self.at_client, self.at_server):
            end.setblocking(False)

    def carry(self, change: Callable[[bytes], bytes] = lambda data: data) -> bytes:
        """Forward the client's data after `change`, and the server's data unchanged. Returns what the client sent."""
        sent = _taken(self.at_client)
        if sent:
            self.at_server.sendall(change(sent))
        if back := _taken(self.at_server):
            self.at_client.sendall(back)
        return sent


def _taken(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 20)
    except BlockingIOError:
        return b""


def connect_both_sides(token: bytes = TOKEN) -> tuple[Relay, ControlConnection, ControlConnection]:
    """Return a client and a server that have exchanged keys."""
    relay = Relay()
    client = ControlConnection(relay.client_end, side="client", token=token)
    server = ControlConnection(relay.server_end, side="server", token=TOKEN)
    for _ in range(3):
        relay.carry()
        assert client.receive() == server.receive() == []
    return relay, client, server


def test_messages_arrive_unchanged_and_in_order():
    relay, client, server = connect_both_sides()
    frames = [
        JoinRequest(host=1, facts=facts()),
        Heartbeat(),
        WorkerRecords(records=(ScriptFinished(rank=3, time_ns=5, exit_code=7),)),
        HostEnded(),
    ]
    for frame in frames:
        client.send(frame)
    server.send(JobEnded(exit_code=3, text="é"))
    relay.carry()
    assert server.receive() == frames
    assert client.receive() == [JobEnded(exit_code=3, text="é")]


@pytest.mark.parametrize("size", [1, 7])
def test_messages_that_arrive_in_pieces_are_reassembled(size: int):
    relay, client, server = connect_both_sides()
    client.send(JobEnded(exit_code=1, text="x" * 50))
    data = _taken(relay.at_client)
    found = []
    for start in range(0, len(data), size):
        relay.at_server.sendall(data[start : start + size])
        found += server.receive()
    assert found == [JobEnded(exit_code=1, text="x" * 50)]


def test_a_client_with_a_different_token_is_rejected():
    relay, client, server = connect_both_sides(secrets.token_bytes(32))
    client.send(Heartbeat())
    relay.carry()
    with pytest.raises(ConnectionBrokenError, match="a different token"):
        server.receive()


@pytest.mark.parametrize("is_reset", [False, True])
def test_the_last_message_arrives_although_the_sender_has_closed(is_reset: bool):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = connect_to_leader("127.0.0.1", listening.getsockname()[1], token=TOKEN, timeout_seconds=2)
        accepted, _ = listening.accept()
    server = ControlConnection(accepted, side="server", token=TOKEN)
    for _ in range(3):
        assert server.receive() == client.receive() == []
    if is_reset:  # what the server has not read when it closes
        client.send(Heartbeat())
        client.send(Heartbeat())
    server.send(JobEnded(exit_code=3))
    server.close()
    assert client.receive() == [JobEnded(exit_code=3)]
    with pytest.raises(ConnectionBrokenError):
        client.receive()


def test_closing_waits_until_the_other_side_has_received_everything():
    relay, client, server = connect_both_sides()
    client.send(Heartbeat())
    relay.carry()
    server.send(JobEnded(exit_code=0))
    assert not server.finish_closing()
    relay.carry()
    assert client.receive() == [JobEnded(exit_code=0)]
    client.close()
    relay.at_server.close()
    assert server.finish_closing()


TAMPERED: dict[str, Callable[[bytes], bytes]] = {
    "a byte is changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a proof is changed": lambda data: data[:4] + bytes([data[4] ^ 1]) + data[5:],
    "a frame is repeated": lambda data: data + data,
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_frame_ends_the_connection(name: str):
    relay, client, server = connect_both_sides()
    client.send(Heartbeat())
    relay.carry()
    assert server.receive() == [Heartbeat()]
    client.send(JobEnded(exit_code=0))
    relay.carry(TAMPERED[name])
    with pytest.raises(ConnectionBrokenError, match="modified or repeated"):
        server.receive()


def test_a_dropped_or_reflected_frame_ends_the_connection():
    relay, client, server = connect_both_sides()
    client.send(Heartbeat())
    relay.carry(lambda _: b"")
    client.send(JobEnded(exit_code=0))
    sent = relay.carry()
    with pytest.raises(ConnectionBrokenError):
        server.receive()
    relay.at_client.sendall(sent)
    with pytest.raises(ConnectionBrokenError):
        client.receive()


def test_frames_replayed_from_another_session_are_rejected():
    relay, client, server = connect_both_sides()
    client.send(Heartbeat())
    recorded = relay.carry()
    assert server.receive() == [Heartbeat()]
    later = Relay()
    replayed = ControlConnection(later.server_end, side="server", token=TOKEN)
    later.at_server.sendall(msgspec_frame(ClientHello(nonce=b"n" * 32)))
    assert replayed.receive() == []
    later.at_server.sendall(recorded)
    with pytest.raises(ConnectionBrokenError, match="a different token"):
        replayed.receive()


def msgspec_frame(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "big") + data


STRANGE = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "rubbish": secrets.token_bytes(500),
    "a pickle": b"\x00\x00\x00\x10\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.\x00",
    "a length without end": b"\xff\xff\xff\xff",
    "an empty frame": b"\x00\x00\x00\x00",
    "another protocol": msgspec_frame(ClientHello(protocol=99, nonce=b"n" * 32)),
    "a short nonce": msgspec_frame(ClientHello(nonce=b"n")),
    "the answer before the question": msgspec_frame(ServerHello(nonce=b"n" * 32)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_client_that_is_no_agent_is_rejected_at_once(name: str):
    relay = Relay()
    server = ControlConnection(relay.server_end, side="server", token=TOKEN)
    relay.at_server.sendall(STRANGE[name])
    with pytest.raises(ConnectionBrokenError, match=r"not a Rankless agent|another version"):
        server.receive()


def test_a_frame_above_the_limit_is_neither_sent_nor_awaited():
    relay, client, server = connect_both_sides()
    with pytest.raises(ConnectionBrokenError, match="too long"):
        client.send(JobEnded(exit_code=0, text="x" * MAX_FRAME_BYTES))
    client.send(Heartbeat())
    relay.carry()
    assert server.receive() == [Heartbeat()]
    relay.at_server.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ConnectionBrokenError, match="above the limit"):
        server.receive()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    listening = socket.create_server(("127.0.0.1", 0))
    made = ControlServer(listening, token=TOKEN, host_count=3)
    made.port = listening.getsockname()[1]  # type: ignore[attr-defined]
    yield made
    made.close()


def join(server: ControlServer, *, host: int = 1, token: bytes = TOKEN) -> LeaderConnection:
    session = connect_to_leader("127.0.0.1", server.port, token=token, timeout_seconds=2)  # type: ignore[attr-defined]
    session.send(JoinRequest(host=host, facts=facts()))
    return LeaderConnection(session)


def poll_all(server: ControlServer, *connections: LeaderConnection, until: int = 1) -> list[Any]:
    """Poll all sides until the server has returned this number of events."""
    found: list[Any] = []
    deadline = time.monotonic() + 5
    while len(found) < until and time.monotonic() < deadline:
        found += server.poll(time.monotonic())
        for connection in connections:
            connection.poll(time.monotonic())
    return found


def poll_until_error(server: ControlServer, connection: LeaderConnection, events: list[Any]) -> None:
    """Poll both sides until one raises."""
    while True:
        events += server.poll(time.monotonic())
        connection.poll(time.monotonic())


def test_hosts_join_report_and_end(server: ControlServer):
    one, two = join(server), join(server, host=2)
    arrived = poll_all(server, one, two, until=2)
    assert {event.host for event in arrived} == {1, 2} == server.connected_hosts == server.running_hosts
    assert all(
        isinstance(event, HostJoined) and not find_differences(facts(), event.facts, received_seconds=time.time())
        for event in arrived
    )
    one.send(WorkerRecords(records=(ScriptFinished(rank=1, time_ns=0, exit_code=0),)))
    (reported,) = poll_all(server, one, two)
    assert isinstance(reported, HostReported)
    one.send(HostEnded(fork_server_exit_code=0))
    poll_all(server, one, two)
    assert server.running_hosts == {2}
    one.close()
    two.close()
    closed = "the connection was closed"
    assert poll_all(server) == [HostDisconnected(1, closed, has_ended=True), HostDisconnected(2, closed)]
    assert server.connected_hosts == frozenset()


def test_a_second_host_with_the_same_index_is_refused(server: ControlServer):
    one = join(server)
    poll_all(server, one)
    again = join(server)
    received: list[Any] = []
    events: list[Any] = []
    while not received:
        events += server.poll(time.monotonic())
        one.poll(time.monotonic())
        received += again.poll(time.monotonic())
    assert isinstance(received[0], JoinRefused)
    assert isinstance(events[0], ConnectionRejected)
    assert server.connected_hosts == {1}


def test_both_sides_report_a_different_token(server: ControlServer):
    connection = join(server, token=secrets.token_bytes(32))
    events: list[Any] = []
    with pytest.raises(TokenRejectedError, match="token"):
        poll_until_error(server, connection, events)
    assert isinstance(events[0], ConnectionRejected)
    assert "a different token" in events[0].reason


def test_a_host_without_heartbeats_is_lost(server: ControlServer):
    one = join(server)
    poll_all(server, one)
    later = time.monotonic() + messages.HEARTBEAT_TIMEOUT_SECONDS + 1
    (lost,) = server.poll(later)
    assert isinstance(lost, HostDisconnected)
    assert "no heartbeat" in lost.reason
    two = join(server, host=2)
    poll_all(server, two)
    with pytest.raises(ConnectionBrokenError, match=r"no heartbeat|closed"):
        two.poll(time.monotonic() + messages.HEARTBEAT_TIMEOUT_SECONDS + 1)


def test_silent_clients_are_dropped_and_whom_they_displace_may_try_again(server: ControlServer):
    displaced, rejected = join(server), []
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_NEW_CLIENTS + 50):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))  # type: ignore[attr-defined]
            rejected += server.poll(time.monotonic())
        with pytest.raises(LeaderUnreachableError, match="before host 0 had authenticated itself"):
            poll_until_error(server, displaced, rejected)
        one = join(server)
        while not server.connected_hosts:
            rejected += server.poll(time.monotonic())
            one.poll(time.monotonic())
        rejected += server.poll(time.monotonic() + HANDSHAKE_SECONDS + 1)
        assert sum(isinstance(event, ConnectionRejected) for event in rejected) == MAX_NEW_CLIENTS + 51


def test_an_unreachable_leader_raises_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(LeaderUnreachableError, match="no process listens at"):
        connect_to_leader("127.0.0.1", port, token=TOKEN, timeout_seconds=1)
    with pytest.raises(LeaderUnreachableError, match="does not resolve"):
        connect_to_leader("no-such-host.invalid", port, token=TOKEN, timeout_seconds=1)


class LateErrorSocket(socket.socket):
    """A socket whose `connect` returns before its error is set, as Python's sometimes does without a route."""

    def connect(self, address: Any) -> None:
        self.setblocking(False)
        self.connect_ex(address)


def test_a_connect_error_that_appears_late_still_raises(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr("rankless.launch.rendezvous.tcp_connect_and_reachability.socket.socket", LateErrorSocket)
    with pytest.raises(LeaderUnreachableError, match="no process listens at"):
        connect_to_leader("127.0.0.1", port, token=TOKEN, timeout_seconds=1)


def test_a_connection_that_breaks_at_once_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch):
    here, there = socket.socketpair()
    there.close()
    monkeypatch.setattr("rankless.launch.rendezvous.control_connection.open_connection", lambda *_, **__: here)
    with pytest.raises(LeaderUnreachableError, match="the connection was lost"):
        connect_to_leader("127.0.0.1", 1, token=TOKEN, timeout_seconds=1)
    assert here.fileno() == -1


def test_differences_between_hosts_have_a_fix():
    here = facts()
    there = msgspec.structs.replace(
        here,
        versions={**here.versions, "torch": "2.12.0"},
        program_digest="0" * 64,
        arguments=("--epochs", "2"),
        hosts=("b:1", "a:1"),
        time_seconds=here.time_seconds + 120,
    )
    found = {item.what: item for item in find_differences(here, there, received_seconds=here.time_seconds)}
    assert set(found) == {
        "the version of torch",
        "the code",
        "the script's arguments",
        "the hosts of the job",
        "the clock",
    }
    assert found["the version of torch"].there == "2.12.0"
    assert "120 s ahead" in found["the clock"].there
    assert all(item.fix for item in found.values())
