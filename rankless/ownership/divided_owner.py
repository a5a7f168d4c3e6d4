"""The owner that divides states between the workers along an axis: each holds, and steps on, its pieces.

This is ZeRO (Rajbhandari et al., SC 2020). What is divided is in the job's plan: the state of optimizers, also
gradients, or also parameters.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from rankless.collectives.mesh_collectives import all_reduce, all_reduce_maximum, start_all_gather
from rankless.errors import ConfigError
from rankless.ownership.divided_parameter import DividedParameter, make_divided_parameter
from rankless.ownership.host_memory import copy_to_device, copy_to_host
from rankless.ownership.optimizer_pieces import list_parameters, on_pieces, read_state
from rankless.ownership.owned_state import share_state
from rankless.ownership.partitioned_tensor import WholeValues, find_partition, gather_pieces
from rankless.ownership.piece_layout import PieceGroup, PieceLayout, group_in_order
from rankless.ownership.replica import Replica
from rankless.ownership.shared_pieces import SharedPieces, SharedValue
from rankless.ownership.unread_tensor import UnreadTensor
from rankless.parallel.mesh import WorkerGroup
from rankless.parallel.tensor_placement import BlockedShard, Shard
from rankless.records.parallel_plan import JobPlan, StateDivision, StatePlan

GATHER_BYTES = 25 * 2**20
"""The size of whole parameters that are gathered together after a step."""


class DividedOwner:
    """Holds pieces of the states that plans divide, and whole ones of all others.

    Args:
        group: The workers that divide states.
        require_all: Called with what is about to be gathered for the script. Raises if not all workers take part.
        shares_values: Whether workers of one host may hold divided values in one memory.
    """

    def __init__(self, group: WorkerGroup, require_all: Callable[[str], None], *, shares_values: bool = True) -> None:
        self.version = 0
        self._group = group
        self._values = WholeValues(group, require_all)
        self._shared = SharedPieces(group)
        self._shares_values = shares_values
        self._divided: dict[int, DividedParameter] = {}
        self._pieces: dict[int, torch.device] = {}
        """The device of each divided parameter, by the id of the worker's piece."""

    def divide(
        self,
        plan: JobPlan,
        tensors: Mapping[str, Tensor],
        *,
        line: str,
        complete: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """Divide the parameters of a job as its plan says, and free the whole ones. Collective.

        All workers have the same whole ones.

        Args:
            plan: The job's plan.
            tensors: The job's parameters and buffers by name.
            line: The job's line, for errors.
            complete: Called with the name of a parameter that is about to be divided, and the parameter, which has a
                value afterwards. Each is then freed before the next. Default: all have values.

        Raises:
            ConfigError: Another job divides a parameter in another way.
        """
        new: dict[str, tuple[nn.Parameter, PieceLayout]] = {}
        for name, state in plan.states.items():
            division, parameter = state.optimizer_state, tensors[name]
            if division is None or not isinstance(parameter, nn.Parameter):
                continue
            placement = read_placement(division)
            known = self._divided.get(id(parameter))
            if known is None:
                new[name] = parameter, PieceLayout.of(parameter, placement)
            else:
                require_same_division(known, placement, state, line)
        shared = {}
        if self._shares_values:
            shared = self._shared.allocate([(name, *item) for name, item in new.items() if plan.states[name].value])
        for name, (parameter, layout) in new.items():
            if complete is not None:
                complete(name, parameter)
            self._divide_one(name, parameter, layout, plan.states[name], shared.get(name))
            if complete is not None:
                self.begin_call()
        self.begin_call()

    def _divide_one(
        self, name: str, parameter: nn.Parameter, layout: PieceLayout, plan: StatePlan, shared: SharedValue | None
    ) -> None:
        """Divide a parameter that is not divided yet."""
        actual = PieceLayout.of(parameter, layout.placement)
        if actual != layout:  # a deferred parameter lies otherwise in memory than its recording says
            layout, shared = actual, None
        divided = make_divided_parameter(parameter, layout, self._values, name=name, state=plan, shared=shared)
        self._divided[id(parameter)] = divided
        self._pieces[id(divided.piece)] = parameter.device
        self.version += 1

    def begin_call(self) -> None:
        """Take the changes of the script to whole values. Collective if it has read any."""
        if self._values.is_open:
            self._shared.begin_write()
            self._values.write_back()

    def end_call(self) -> None:
        """Update the whole values that the script holds. Collective if there are any."""
        self._values.refresh()

    def get_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return for each parameter the tensor that has this worker's gradient."""
        found = map(self._divided.get, map(id, parameters))
        return [item if known is None else known.holder for item, known in zip(parameters, found, strict=True)]

    def take_gradients(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Give the holder of each parameter its gradient, on the host if its piece is there."""
        known = [self._divided.get(id(item)) for item in parameters]
        moved = [
            place
            for place, item in enumerate(known)
            if item is not None and item.divides_gradient and item.is_offloaded
        ]
        placed = list(gradients)
        if moved:
            for place, gradient in zip(moved, copy_to_host([gradients[place] for place in moved]), strict=True):
                placed[place] = gradient
        for holder, gradient in zip(self.get_holders(parameters), placed, strict=True):
            holder.grad = gradient

    def get_value(self, tensor: Tensor) -> Tensor:
        """Return what this worker has of a parameter or buffer."""
        known = self._divided.get(id(tensor))
        return known.piece if known is not None and known.divides_value else tensor

    def get_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a program takes of parameters and buffers: the whole value in shared memory, or the piece."""
        found = [self._divided.get(id(item)) for item in tensors]
        if any(known is not None and known.shared is not None for known in found):
            self._shared.begin_read()
        return [
            self.get_value(item) if known is None or known.shared is None else known.shared.whole
            for item, known in zip(tensors, found, strict=True)
        ]

    def find_shared_memory(self, tensor: Tensor) -> int | None:
        """Return the number of the memory in which workers share the whole value; None if they do not."""
        known = self._divided.get(id(tensor))
        return None if known is None or known.shared is None else known.shared.memory

    def begin_write(self) -> None:
        """Wait until no worker reads values that workers share."""
        self._shared.begin_write()

    def set_value(self, tensor: Tensor, whole: Tensor) -> None:
        """Take a new whole value of a parameter or buffer."""
        known = self._divided.get(id(tensor))
        if known is not None and known.shared is not None:
            self._shared.begin_write()
        with torch.no_grad():
            if known is not None and known.divides_value:
                known.piece.copy_(known.layout.get_piece(whole, self._group.rank))
            else:
                tensor.copy_(whole)

    def find_value_placement(self, tensor: Tensor) -> Shard | BlockedShard | None:
        """Return how the value of a parameter or buffer is divided; None for a whole one."""
        known = self._divided.get(id(tensor))
        return known.layout.placement if known is not None and known.divides_value else None

    def find_replica(self, tensor: Tensor) -> Replica:
        """Return this worker's piece of a divided tensor, or a whole one."""
        known = find_partition(tensor)
        return Replica(tensor) if known is None else Replica(known.piece, divided_along=self._group)

    def find_gradient_placement(self, parameter: Tensor) -> Shard | BlockedShard | None:
        """Return how the gradient of a parameter is divided; None for a whole one."""
        known = self._divided.get(id(parameter))
        return known.layout.placement if known is not None and known.divides_gradient else None

    def gather_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter; None if it has none."""
        known = self._divided.get(id(parameter))
        if known is None or not known.divides_gradient or known.piece.grad is None:
            return parameter.grad
        return gather_pieces(known.layout, copy_to_device(known.piece.grad, parameter.device), among=self._group)

    def divide_gradient(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return a copy of what this worker holds of a whole gradient."""
        known = self._divided.get(id(parameter))
        if known is None or not known.divides_gradient:
            return whole.clone()
        return known.place(known.layout.copy_piece(whole, self._group.rank))

    def take_state(self, parameter: Tensor, key: str, stored: UnreadTensor) -> Tensor:
        """Return an entry of a parameter's optimizer state: divided like the parameter, with this worker's piece."""
        known = self._divided.get(id(parameter))
        return stored if known is None else read_state(stored, known, key, self._values)

    def measure_norm(self, holders: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, equal on all workers. Collective if gradients are divided.

        As in `torch.nn.utils.get_total_norm` it is the norm of the norms of all tensors, each in its own dtype.
        """
        whole = [item.grad for item in holders if item.grad is not None and id(item) not in self._pieces]
        pieces = [item.grad for item in holders if item.grad is not None and id(item) in self._pieces]
        norms = list(torch._foreach_norm(whole, 2.0)) if whole else []
        if pieces:
            is_double = any(item.dtype in (torch.float64, torch.complex128) for item in pieces)
            accumulated = torch.float64 if is_double else torch.float32
            real = [torch.view_as_real(item) if item.is_complex() else item for item in pieces]
            squares = torch.stack([torch.linalg.vector_norm(item, 2.0, dtype=accumulated) ** 2 for item in real])
            summed = all_reduce(copy_to_device(squares, self._list_devices(holders)[0]), among=self._group).sqrt()
            norms += [norm.to(item.abs().dtype) for norm, item in zip(summed, pieces, strict=True)]
        if not norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
        return total

    def clip_norm(self, holders: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most `limit`, and return the norm before."""
        norm = self.measure_norm(holders)
        clip_grads_with_norm_([item for item in holders if item.grad is not None], limit, norm)
        return norm

    def find_not_finite(self, holders: Sequence[Tensor]) -> int | None:
        """Return the number of the first holder whose gradient is not finite on some worker."""
        bad = [
            torch.zeros((), dtype=torch.uint8) if item.grad is None else (~item.grad.isfinite().all()).to(torch.uint8)
            for item in holders
        ]
        if not bad:
            return None
        flags = torch.stack([item.to(bad[-1].device) for item in bad])
        devices = self._list_devices(holders)
        if devices:
            flags = all_reduce_maximum(copy_to_device(flags, devices[0]), among=self._group)
        return next((number for number, is_bad in enumerate(flags.tolist()) if is_bad), None)

    def _list_devices(self, holders: Sequence[Tensor]) -> list[torch.device]:
        """Return the device of each divided parameter among the holders, on which the workers can sum."""
        return [self._pieces[id(item)] for item in holders if id(item) in self._pieces]

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on this worker's pieces; then all workers get the parameters that they hold whole."""
        known = [self._divided[id(item)] for item in list_parameters(optimizer) if id(item) in self._divided]
        if any(item.shared is not None for item in known):
            self._shared.begin_write()
        with on_pieces(optimizer, self._divided, self._values):
            optimizer.step()
        share_state(optimizer, self._divided, self._values)
        self._publish([item for item in known if not item.divides_value])

    def _publish(self, stepped: Sequence[DividedParameter]) -> None:
        """Gather the pieces of parameters into the parameters of all workers."""
        pending = None
        for members in group_by_kind(stepped):
            gather = ParameterGather(members, self._group)
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


def read_placement(division: StateDivision) -> Shard | BlockedShard:
    """Return the placement that a plan describes."""
    if division.blocks > 1:
        return BlockedShard(division.dim, division.lengths)
    return Shard(division.dim, division.lengths)


def require_same_division(
    known: DividedParameter, placement: Shard | BlockedShard, state: StatePlan, line: str
) -> None:
    """Raise `ConfigError` for a parameter that another job divides in another way."""
    if (known.layout.placement, known.divides_value, known.divides_gradient, known.is_offloaded) != (
        placement,
        state.value is not None,
        state.gradient is not None,
        state.offloaded,
    ):
        raise ConfigError(
            expected=f"one division of {known.name} between workers",
            found="another one in an earlier job, with another zero=, offload= or plan",
            fix="pass the same zero= and offload= to all jobs whose optimizers step it",
            where=line,
        )
