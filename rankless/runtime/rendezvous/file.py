"""Meeting at a file that all hosts share: ranks sign a list in it, and the list is theirs once it is full.

Note [stale lists]: the file may be left from an earlier run. A list that is full belongs to a meeting that is over: a
rank that comes begins a new one. A list that is not full, and whose last signer has not confirmed it for some seconds,
belongs to processes that are gone.
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
from rankless.runtime.rendezvous.address import RendezvousParameters
from rankless.runtime.rendezvous.tcp import JoinDeadline, Notify, Participant, Rendezvous, waiting_text

CONFIRM_SECONDS = 1.0
STALE_SECONDS = 10.0


class Signed(msgspec.Struct):
    """The list in the file."""

    name: str
    world_size: int
    arrived: dict[int, Participant]
    confirmed: float
    """When a waiting rank was last here, by the clock of its host."""

    @property
    def is_full(self) -> bool:
        """Whether all ranks have signed."""
        return len(self.arrived) == self.world_size


def join_file_rendezvous(parameters: RendezvousParameters, notify: Notify) -> Rendezvous:
    """Meet at a file:// address. Raises JoinError."""
    rank, size = parameters.rank, parameters.world_size
    deadline = JoinDeadline(parameters, notify)
    own = Participant(host_identity(), os.getpid(), size)
    with _locked(parameters.path) as file:
        signed = _read(file)
        if signed is None or signed.is_full or time.time() - signed.confirmed > STALE_SECONDS:
            signed = Signed(name=secrets.token_hex(8), world_size=size, arrived={}, confirmed=0.0)
        _require_room(signed, parameters)
        signed.arrived[rank] = own
        _write(file, signed)
    name = signed.name

    while not signed.is_full:
        waiting_for = partial(waiting_text, parameters, signed.arrived)
        deadline.wait(waiting_for, "start the others, with the same file and world_size")
        with _locked(parameters.path) as file:
            found = _read(file)
            if found is None or found.name != name:
                raise JoinError(
                    expected=f"the list of this meeting in {parameters.path}",
                    found="another, or none",
                    fix="let one job at a time meet at a file, and let nobody remove it meanwhile",
                )
            signed = found
            if not signed.is_full and time.time() - signed.confirmed > CONFIRM_SECONDS:
                _write(file, signed)
    # A store of this meeting's own, which no other has ever written to.
    store = dist.FileStore(f"{parameters.path}.{name}", size)  # type: ignore[attr-defined]  # missing in the stubs
    return Rendezvous(store, [signed.arrived[other] for other in range(size)])


def _require_room(signed: Signed, parameters: RendezvousParameters) -> None:
    if signed.world_size != parameters.world_size:
        raise JoinError(
            expected=f"all ranks with world_size={signed.world_size}, as those who came before",
            found=f"world_size={parameters.world_size} on rank {parameters.rank}",
            fix="start all processes with the same number",
        )
    if parameters.rank in signed.arrived:
        raise JoinError(
            expected=f"one process as rank {parameters.rank} at {parameters}",
            found=f"another, process {signed.arrived[parameters.rank].process_id}, that came before",
            fix="give every process a rank of its own, or wait 10 s for what is left of an earlier run to be forgotten",
        )


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise JoinError(
            expected=f"a file that can be written at {path}",
            found=str(error.strerror),
            fix="name a path in a folder that exists on all hosts, and that this user may write to",
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _read(file: int) -> Signed | None:
    """The list in the file; None for an empty file. Raises JoinError for what is no list: it may be somebody's work."""
    data = os.pread(file, 1 << 20, 0)
    try:
        return msgspec.json.decode(data, type=Signed) if data else None
    except msgspec.DecodeError:
        raise JoinError(
            expected="a file in which only Rankless has written, or none yet",
            found=f"{len(data)} bytes of something else" + ", as of torch's FileStore" * (b"\0" in data),
            fix="name another path, or remove that file if it is of no use",
        ) from None


def _write(file: int, signed: Signed) -> None:
    signed.confirmed = time.time()
    data: Any = msgspec.json.encode(signed)
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    os.fsync(file)
