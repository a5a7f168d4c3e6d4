"""A parameter of which each worker has a piece for its optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankless.errors import ConfigError
from rankless.ownership.host_memory import copy_to_host
from rankless.ownership.partitioned_tensor import Partition, WholeValues, divide_parameter
from rankless.ownership.piece_layout import PieceLayout
from rankless.ownership.shards_in_shared_memory import SharedValue
from rankless.parallel.tensor_placement import Shard
from rankless.records.parallel_plan import StatePlan


@dataclass(frozen=True, kw_only=True)
class DividedParameter:
    """A parameter of which this worker has a piece for the optimizer.

    Attributes:
        parameter: What the script has.
        piece: What the optimizer steps on.
        layout: How the parameter is divided.
        name: What errors call it.
        divides_value: Whether the worker holds only its piece of the value.
        divides_gradient: Whether it holds only its piece of the gradient.
        is_offloaded: Whether the piece lies in the memory of the host; see Note [offloaded pieces].
        shared: Where its value lies, if workers hold the pieces of it in one memory.
    """

    parameter: nn.Parameter
    piece: nn.Parameter
    layout: PieceLayout
    name: str
    divides_value: bool
    divides_gradient: bool
    is_offloaded: bool
    shared: SharedValue | None = None

    @property
    def holder(self) -> nn.Parameter:
        """The tensor that has this worker's gradient."""
        return self.piece if self.divides_gradient else self.parameter

    def begin_step(self, rank: int) -> None:
        """Give the piece the value and the gradient that this worker's optimizer needs."""
        if not self.divides_value:
            if self.shares_memory:
                self.piece.data = self.layout.get_piece(self.parameter.data, rank)
            else:
                self.piece.data.copy_(self.layout.get_piece(self.parameter.data, rank))
        gradient = self.parameter.grad
        if not self.divides_gradient:
            self.piece.grad = None if gradient is None else self._take_piece(gradient, rank)

    def end_step(self) -> None:
        """Forget the piece of a gradient that the worker has whole."""
        if not self.divides_gradient:
            self.piece.grad = None

    @property
    def is_owned(self) -> bool:
        """Whether one worker has all rows."""
        return len([length for length in self.layout.placement.lengths if length]) == 1

    def has_rows(self, rank: int) -> bool:
        """Return whether a worker has rows of it."""
        return rank in self.layout.holders

    def own(self, shape: tuple[int, ...], order: tuple[int, ...]) -> PieceLayout:
        """Return the layout of a tensor that belongs to the worker that owns the parameter.

        Args:
            shape: The tensor's shape.
            order: Its dims from the slowest to the fastest in memory.
        """
        lengths = tuple(shape[0] if length else 0 for length in self.layout.placement.lengths)
        return PieceLayout(shape, order, Shard(0, lengths), self.layout.copies)

    @property
    def has_ranges(self) -> bool:
        """Whether the parameter's memory is whole, with the piece of each worker as one range of it."""
        is_as_planned = self.parameter.stride() == self.layout.strides
        return not self.divides_value and is_as_planned and self.layout.is_contiguous_piece()

    @property
    def shares_memory(self) -> bool:
        """Whether the piece is a part of the parameter's memory."""
        return self.has_ranges and self.piece.device == self.parameter.device

    def place(self, value: Tensor) -> Tensor:
        """Return what belongs to the piece where the piece lies: on the device, or on the host."""
        return copy_to_host([value])[0] if self.is_offloaded else value

    def _take_piece(self, gradient: Tensor, rank: int) -> Tensor:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                expected=f"a dense gradient of {self.name}, which is divided between workers",
                found=f"a gradient with the layout {gradient.layout}",
                fix="use sparse=False, or no zero=",
            )
        if self.layout.is_contiguous_piece() and gradient.stride() == self.layout.strides:
            return self.place(self.layout.get_piece(gradient, rank))
        return self.place(self.layout.copy_piece(gradient, rank))


def make_divided_parameter(
    parameter: nn.Parameter,
    layout: PieceLayout,
    values: WholeValues,
    *,
    name: str,
    state: StatePlan,
    shared: SharedValue | None,
) -> DividedParameter:
    """Divide a parameter, which every worker has whole.

    Args:
        parameter: The parameter.
        layout: How it is divided.
        values: Gathers whole values for the script.
        name: What errors call it.
        state: Which of its value and gradient each worker keeps only its piece of, and where.
        shared: Where the pieces of the value go, if they lie in one memory. Workers must be writing.
    """
    whole, rank = parameter.detach(), values.group.rank
    own = layout.copy_piece(whole, rank) if shared is None else shared.piece.copy_(layout.get_piece(whole, rank))
    placed = copy_to_host([own])[0] if state.offloaded else own
    piece = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    if state.value:
        partition = Partition(layout, piece, name, values, device=whole.device)
        divide_parameter(parameter, partition)
        values.keep(partition, whole)
    return DividedParameter(
        parameter=parameter,
        piece=piece,
        layout=layout,
        name=name,
        divides_value=bool(state.value),
        divides_gradient=bool(state.gradient),
        is_offloaded=state.offloaded,
        shared=shared,
    )
