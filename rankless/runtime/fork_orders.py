"""What an agent and its fork server say to each other: a plan and descriptors down, the new process's id up."""

import contextlib
import socket

import msgspec

from rankless.plan.run_plan import HostPlan

READY = b"R"
"""Said once by the fork server, when it has imported all."""
MOST_DESCRIPTORS = 253
"""What Linux passes with one message."""
_NUMBER_BYTES = 8


def send_order(server: socket.socket, plan: HostPlan, descriptors: list[int]) -> None:
    """Ask for a warm parent that has this plan and these descriptors."""
    text = msgspec.json.encode(plan)
    socket.send_fds(server, [len(text).to_bytes(_NUMBER_BYTES)], descriptors)
    server.sendall(text)


def receive_order(agent: socket.socket) -> tuple[HostPlan, list[int]] | None:
    """A plan, and descriptors as they are numbered here; None once there will be no other."""
    size, descriptors, _flags, _address = socket.recv_fds(agent, _NUMBER_BYTES, MOST_DESCRIPTORS, socket.MSG_WAITALL)
    if len(size) < _NUMBER_BYTES:
        return None
    text = agent.recv(int.from_bytes(size), socket.MSG_WAITALL)
    return msgspec.json.decode(text, type=HostPlan), descriptors


def send_number(agent: socket.socket, process_id: int) -> None:
    """Tell the id of the process that was asked for."""
    agent.sendall(process_id.to_bytes(_NUMBER_BYTES))


def receive_number(server: socket.socket) -> int | None:
    """The new process's id; None if the fork server has gone."""
    with contextlib.suppress(OSError):
        number = server.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        return int.from_bytes(number) if len(number) == _NUMBER_BYTES else None
    return None
