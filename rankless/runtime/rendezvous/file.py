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

from rankless.collectives.shared_memory import host_identity
from rankless.errors import JoinError
from rankless.runtime.rendezvous.parameters import RendezvousParameters
from rankless.runtime.rendezvous.tcp import JoinDeadline, Notify, Participant, Rendezvous, describe_missing_ranks

CONFIRM_SECONDS = 1.0
STALE_SECONDS = 10.0


class Registration(msgspec.Struct):
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


def join_file_rendezvous(parameters: RendezvousParameters, notify: Notify) -> Rendezvous:
    """Join the other ranks at a file:// address. Raises JoinError."""
    rank, size = parameters.rank, parameters.world_size
    deadline = JoinDeadline(parameters, notify)
    own = Participant(host_identity(), os.getpid(), size)
    with _open_locked(parameters.path) as file:
        registration = _read(file)
        if registration is None or registration.is_complete or time.time() - registration.confirmed > STALE_SECONDS:
            registration = Registration(name=secrets.token_hex(8), world_size=size, participants={}, confirmed=0.0)
        _require_free_rank(registration, parameters)
        registration.participants[rank] = own
        _write(file, registration)
    name = registration.name

    while not registration.is_complete:
        describe = partial(describe_missing_ranks, parameters, registration.participants)
        deadline.wait(describe, "start the others, with the same file and world_size")
        with _open_locked(parameters.path) as file:
            found = _read(file)
            if found is None or found.name != name:
                raise JoinError(
                    expected=f"the registrations of this rendezvous in {parameters.path}",
                    found="those of another, or none",
                    fix="let one job at a time use the file, and do not remove it meanwhile",
                )
            registration = found
            if not registration.is_complete and time.time() - registration.confirmed > CONFIRM_SECONDS:
                _write(file, registration)
    # This rendezvous uses a store file of its own, which no other run has written to.
    store = dist.FileStore(f"{parameters.path}.{name}", size)  # type: ignore[attr-defined]  # missing in the stubs
    return Rendezvous(store, [registration.participants[other] for other in range(size)])


def _require_free_rank(registration: Registration, parameters: RendezvousParameters) -> None:
    if registration.world_size != parameters.world_size:
        raise JoinError(
            expected=f"all ranks with world_size={registration.world_size}, like those that registered before",
            found=f"world_size={parameters.world_size} on rank {parameters.rank}",
            fix="start all processes with the same number",
        )
    if parameters.rank in registration.participants:
        other = registration.participants[parameters.rank]
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


def _read(file: int) -> Registration | None:
    """Read the registrations, None from an empty file. Raises JoinError for any other content: it may be valuable."""
    data = os.pread(file, 1 << 20, 0)
    try:
        return msgspec.json.decode(data, type=Registration) if data else None
    except msgspec.DecodeError:
        raise JoinError(
            expected="a file that only Rankless has written, or no file",
            found=f"{len(data)} bytes of something else" + ", as of torch's FileStore" * (b"\0" in data),
            fix="choose another path, or remove that file if nobody needs it",
        ) from None


def _write(file: int, registration: Registration) -> None:
    registration.confirmed = time.time()
    data: Any = msgspec.json.encode(registration)
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    os.fsync(file)
