"""Ask servers for the rows of the next call after a step; see Note [early rows] in `context.upcoming_batches`."""

from dataclasses import replace

import torch
from torch import Tensor

from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.extensions.servers.training.shared_tables import SharedTables
from rankless.jobs.programs.bound_program import BoundProgram, collect_inputs
from rankless.jobs.programs.program_cache import CacheLookup


class EarlyRows:
    """Predicts the lookups of a job's next call: those of its last program, with the loaders' next batches."""

    def __init__(self, world: World, shared: SharedTables) -> None:
        self._world = world
        self._shared = shared
        self._last: tuple[BoundProgram, CacheLookup] | None = None
        self._is_of_use = True

    def note_call(self, bound: BoundProgram, call: CacheLookup) -> None:
        """Note a call and the program that has run for it."""
        can_predict = self._is_of_use and self._shared.reads_early(self._world) and bound.local.ids is not None
        self._last = (bound, call) if can_predict else None
        if can_predict:
            self._shared.upcoming.is_wanted = True

    def request(self) -> None:
        """Ask for the rows of the next call, if the last call had tensors of a batch that another one follows."""
        if self._last is None:
            return
        bound, call = self._last
        self._last = None
        found = [self._find_next(tensor) for tensor in call.arguments.tensors]
        if not any(is_next for _, is_next in found) or bound.local.ids is None:
            return
        tensors = tuple(tensor for tensor, _ in found)
        if [each.shape for each in tensors] != [each.shape for each in call.arguments.tensors]:
            return  # the next call has another program
        arguments = replace(call.arguments, tensors=tensors)
        values = collect_inputs(bound, arguments, call.shardings, self._world.mesh)
        try:
            lookups = bound.local.ids(values, list(bound.sizes(arguments).values()))
        except Exception:  # an operator refuses the values of the next batch: the next call raises it
            return
        if self._shared.tables is not None:
            self._is_of_use = self._shared.tables.request_rows(lookups)

    def _find_next(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return what follows an argument, and whether it does: otherwise it is the argument itself."""
        if not isinstance(tensor, LogicalTensor) or not tensor.fingerprint:
            return tensor, False
        following = self._shared.upcoming.find(tensor.fingerprint)
        is_alike = (
            isinstance(following, LogicalTensor)
            and following.mesh is tensor.mesh
            and following.placement == tensor.placement
        )
        if following is None or not is_alike:
            return tensor, False
        with torch.no_grad():
            return following.to(tensor.device, tensor.dtype), True
