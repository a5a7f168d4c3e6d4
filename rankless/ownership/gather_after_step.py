"""Gather parameters that every worker holds whole, after each has stepped on its piece."""

from collections.abc import Sequence

import torch

from rankless.collectives.mesh_collectives import start_all_gather
from rankless.ownership.divided_parameter import DividedParameter
from rankless.ownership.host_memory import copy_to_device
from rankless.ownership.piece_layout import PieceGroup, group_in_order
from rankless.parallel.mesh import WorkerGroup

GATHER_BYTES = 25 * 2**20
"""The size of whole parameters that are gathered together after a step."""


def gather_after_step(stepped: Sequence[DividedParameter], group: WorkerGroup) -> None:
    """Gather the pieces of parameters into the parameters of all workers.

    Args:
        stepped: The parameters.
        group: The workers that have the pieces.
    """
    pending = None
    for members in group_by_kind(stepped):
        gather = ParameterGather(members, group)
        gather.start()
        if pending is not None:
            pending.finish()
        pending = gather
    if pending is not None:
        pending.finish()


class ParameterGather:
    """Gathers the pieces of some parameters into the parameters, which every worker holds whole."""

    def __init__(self, members: Sequence[DividedParameter], group: WorkerGroup) -> None:
        self._members = members
        self._group = group
        self._pieces = PieceGroup(tuple(member.layout for member in members), group.size)

    def start(self) -> None:
        """Begin to gather."""
        first = self._members[0]
        device = first.parameter.device
        chunk = self._pieces.join_pieces([copy_to_device(member.piece.detach(), device) for member in self._members])
        self._in_place = self._pieces.is_one_memory and first.has_ranges
        self._flat = (
            first.layout.flatten(first.parameter.detach())
            if self._in_place
            else chunk.new_empty(self._pieces.flat_size)
        )
        self._work = start_all_gather(self._flat, chunk, among=self._group)

    def finish(self) -> None:
        """Wait, and copy what has not been gathered into place."""
        if self._work is not None:
            self._work.wait()
        wholes = [member.parameter for member in self._members]
        with torch.no_grad():
            if not self._in_place:
                self._pieces.copy_to_wholes(self._flat, [whole.detach() for whole in wholes])
            for whole in wholes:
                torch.autograd.graph.increment_version(whole)


def group_by_kind(members: Sequence[DividedParameter]) -> list[list[DividedParameter]]:
    """Group parameters of one dtype and device, up to a size."""
    return group_in_order(
        members,
        kind=lambda member: (member.parameter.dtype, member.parameter.device),
        size=lambda member: member.parameter.numel() * member.parameter.element_size(),
        limit=lambda _member, _groups: GATHER_BYTES,
    )
