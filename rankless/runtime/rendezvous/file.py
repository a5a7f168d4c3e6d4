"""Rendezvous through a file that all hosts share: each rank registers in it, and it is complete once all have.

Note [stale registrations]: the file may be left over from an earlier run. A complete list belongs to an earlier
rendezvous, so a rank that arrives starts a new list. The waiting ranks confirm an incomplete list every second. If
nobody has confirmed it for some seconds, its processes are gone.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist

from rankless.collectives.shared_memory_file import host_identity
from rankless.errors import JoinError
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters
from rankless.runtime.rendezvous.join_at_tcp_address import (
    CompletedRendezvous,
    JoinDeadline,
    Notify,
    Participant,
    describe_missing_ranks,
)

CONFIRM_SECONDS = 1.0
STALE_SECONDS = 10.0


class RendezvousFile(msgspec.Struct):
    """The content of the file."""

    name: str
    world_size: int
    participants: dict[int, Participant]
    confirmed: float
    """When a waiting rank last confirmed it, by the clock of that rank's host."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have registered."""
        return len(self.participants) == self.world_size


def join_file_rendezvous(parameters: RendezvousParameters, notify: Notify) -> CompletedRendezvous:
    """Join the other ranks at a file:// address. Raises JoinError."""
    rank, size = parameters.rank, parameters.world_size
    deadline = JoinDeadline(parameters, notify)
    own = Participant(host_identity(), os.getpid(), size)
    with _open_locked(parameters.path) as file:
        content = _read(file)
        if content is None or content.is_complete or time.time() - content.confirmed > STALE_SECONDS:
            content = RendezvousFile(name=secrets.token_hex(8), world_size=size, participants={}, confirmed=0.0)
        _require_free_rank(content, parameters)
        content.participants[rank] = own
        _write(file, content)
    name = content.name

    while not content.is_complete:
        describe = partial(describe_missing_ranks, parameters, content.participants)
        deadline.wait(describe, "start the others, with the same file and world_size")
        with _open_locked(parameters.path) as file:
            found = _read(file)
            if found is None or found.name != name:
                raise JoinError(
                    expected=f"the registrations of this rendezvous in {parameters.path}",
                    found="those of another, or none",
                    fix="let one job at a time use the file, and do not remove it meanwhile",
                )
            content = found
            if not content.is_complete and time.time() - content.confirmed > CONFIRM_SECONDS:
                _write(file, content)
    # This rendezvous uses a store file of its own, which no other run has written to.
    store = dist.FileStore(f"{parameters.path}.{name}", size)  # type: ignore[attr-defined]  # missing in the stubs
    return CompletedRendezvous(store, [content.participants[other] for other in range(size)])


def _require_free_rank(content: RendezvousFile, parameters: RendezvousParameters) -> None:
    if content.world_size != parameters.world_size:
        raise JoinError(
            expected=f"all ranks with world_size={content.world_size}, like those that registered before",
            found=f"world_size={parameters.world_size} on rank {parameters.rank}",
            fix="start all processes with the same number",
        )
    if parameters.rank in content.participants:
        other = content.participants[parameters.rank]
        raise JoinError(
            expected=f"one process as rank {parameters.rank} at {parameters}",
            found=f"a second one: process {other.process_id} has registered before",
            fix="give every process a rank of its own; or wait 10 s, until the registrations of an earlier run expire",
        )


@contextlib.contextmanager
def _open_locked(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise JoinError(
            expected=f"a file that can be written at {path}",
            found=str(error.strerror),
            fix="choose a path in a folder that exists on all hosts, and that this user may write to",
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _read(file: int) -> RendezvousFile | None:
    """Read the registrations, None from an empty file. Raises JoinError for any other content: it may be valuable."""
    data = os.pread(file, 1 << 20, 0)
    try:
        return msgspec.json.decode(data, type=RendezvousFile) if data else None
    except msgspec.DecodeError:
        raise JoinError(
            expected="a file that only Rankless has written, or no file",
            found=f"{len(data)} bytes of something else" + ", as of torch's FileStore" * (b"\0" in data),
            fix="choose another path, or remove that file if nobody needs it",
        ) from None


def _write(file: int, content: RendezvousFile) -> None:
    content.confirmed = time.time()
    data: Any = msgspec.json.encode(content)
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    os.fsync(file)
