"""Begins the logical view of a worker's script, once the script imports torch or has its first effect."""

import struct
import sys

import torch
import torch.distributed as dist

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.context.world import World
from rankless.logical_view.agreement import RankAgreement
from rankless.plain_script.effects_on_first_rank import Effects
from rankless.plain_script.install_view import install
from rankless.runtime.current_context import current_context
from rankless.runtime.process_context import RecordObserver

LENGTH = struct.Struct("<q")
PACKET_BYTES = 512
"""Messages of at most this size, less the length, take one broadcast."""


class Meeting:
    """The ranks of a run, which an effect of the script meets. See `EffectRanks`.

    Args:
        world: The ranks.
        agreement: What they compare when they meet.
    """

    def __init__(self, world: World, agreement: RankAgreement) -> None:
        self._mesh = world.mesh
        self._agreement = agreement
        self._compares = True

    def check(self, where: str) -> None:
        """Raise `RanksDiverged` if another rank is at a different call. No rank waits."""
        if self._compares:
            self._agreement.check(where)

    def meet(self, where: str) -> None:
        """Check, and return when every rank has made this call."""
        self.check(where)
        if self._mesh.group is not None:
            arrived = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
            dist.all_reduce(arrived, group=self._mesh.group)
            arrived.item()  # on a GPU, the collective is over only now
            if self._compares:
                self._mesh.check_sync_point_again()

    def share(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on every rank."""
        mesh = self._mesh
        if mesh.group is None:
            return data
        packet = bytearray(PACKET_BYTES)
        LENGTH.pack_into(packet, 0, len(data))
        if len(data) <= PACKET_BYTES - LENGTH.size:
            packet[LENGTH.size : LENGTH.size + len(data)] = data
        sent = torch.frombuffer(packet, dtype=torch.uint8).to(mesh.device)
        dist.broadcast(sent, group=mesh.group, group_src=0)
        received = sent.cpu().numpy().tobytes()
        (length,) = LENGTH.unpack_from(received)
        if length > PACKET_BYTES - LENGTH.size:
            return broadcast_bytes(data, mesh=mesh)
        return received[LENGTH.size : LENGTH.size + length]

    def note(self, value: object, what: str) -> None:
        """Note a value that must be equal on all ranks, for the next check."""
        self._agreement.note(value, what)

    def finish(self) -> None:
        """Compare no more: the ranks have reached the end of the script, and meet in what it has left for it."""
        self._compares = False


def begin_logical_view(effects: Effects) -> Meeting:
    """Join the other ranks, and let the script see one process whose batches are whole.

    Args:
        effects: What the ranks do once.
    """
    hook = sys.excepthook
    context = current_context(make_observer=_refuse_observer)
    sys.excepthook = hook  # joining has put the rank before each line of a traceback
    context.logical = install(context.world, effects)
    return Meeting(context.world, context.logical.agreement)


def _refuse_observer() -> RecordObserver:
    """Only a process without an agent asks for one."""
    raise AssertionError("the logical view begins in workers of a run")
