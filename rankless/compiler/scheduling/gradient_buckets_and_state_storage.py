"""How the states of a program are stored: in which memory, and which of them a worker holds in pieces.

The memory of gradients is flat buckets that are reduced at once, and views of them in the layouts of the parameters.

Note [memory of a gradient]: autograd gives each `.grad` memory of its own, in the strides of its parameter if these
fill their memory, else contiguous (`AccumulateGrad`, "gradient layout contract"). Fused optimizers depend on the
strides. A script may keep a `.grad`, or change it in place. So buckets are used again only if nobody holds the
gradients of the last step.

Note [shared memory of a gradient]: workers of one host reduce a bucket where it is if it lies in memory that they
share. They get that memory together, at the first call of a program that uses the bucket. If a script holds gradients
of one worker, only that worker uses other memory until they are gone: the group notices, and copies its values.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rankless.collectives.backends.shared_tensor_memory import allocate_reduced
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.ownership.shard_layout import ShardLayout, is_dense, make_dense_strides, order_dims
from rankless.parallel.mesh import MeshAxis, WorkerGroup
from rankless.parallel.tensor_placement import Shard, Sharding, compute_local_shape


@dataclass(frozen=True)
class GradientLayout:
    """The shape and strides of a gradient, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements, which is also what its memory holds."""
        return torch.Size(self.shape).numel()


def find_gradient_layout(parameter: LogicalValue) -> GradientLayout:
    """Return the layout of a parameter's gradient; see Note [memory of a gradient]."""
    shape, strides = parameter.shape, parameter.strides
    if is_dense(shape, strides):
        return GradientLayout(shape, strides)
    return GradientLayout(shape, torch.empty(shape, device="meta").stride())


class ViewedMemory:
    """One flat tensor and views of it.

    Args:
        flat: The tensor. Nobody else has it.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._views: dict[tuple[GradientLayout, ...], list[Tensor]] = {}

    def is_used_elsewhere(self) -> bool:
        """Return whether somebody else holds a tensor over this memory."""
        own = 1 + sum(map(len, self._views.values()))
        storage = self.flat.untyped_storage()  # one more use
        return torch._C._storage_Use_Count(storage._cdata) > own + 1

    def get_views(self, layouts: tuple[GradientLayout, ...]) -> list[Tensor]:
        """Return views of consecutive pieces of the memory in the given layouts."""
        if layouts not in self._views:
            sizes = [layout.size for layout in layouts]
            pieces = self.flat[: sum(sizes)].split(sizes)
            self._views[layouts] = [
                piece.as_strided(layout.shape, layout.strides) for piece, layout in zip(pieces, layouts, strict=True)
            ]
        return self._views[layouts]


class FlatMemory:
    """One flat tensor that is used again from step to step, and views of it.

    `renew` must be called before its first use. It replaces the tensor by new memory if somebody holds a view from the
    last step.

    Args:
        share: Called by `renew`, once for each memory, with a method of this: it returns memory that workers share, if
            there is any, and calls the method when that memory is of no more use. Default: there is none.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        share: Callable[[Callable[[], None]], Tensor | None] = lambda _: None,
    ) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._share, self._must_share = share, True
        self._shared: ViewedMemory | None = None
        self._current: ViewedMemory | None = None

    @property
    def flat(self) -> Tensor:
        """The tensor."""
        assert self._current is not None, "renew has not been called"
        return self._current.flat

    def renew(self) -> None:
        """Replace the memory if it is used elsewhere. See Note [shared memory of a gradient]."""
        if self._must_share:
            shared = self._share(self.release_shared)
            self._shared, self._must_share = None if shared is None else ViewedMemory(shared), False
        if self._shared is not None and not self._shared.is_used_elsewhere():
            self._current = self._shared
        elif self._current is None or self._current is self._shared or self._current.is_used_elsewhere():
            self._current = ViewedMemory(torch.empty(self._size, dtype=self._dtype, device=self._device))

    def release_shared(self) -> None:
        """Give up the memory that workers share. If their group is opened again, they get new memory together."""
        self._must_share = True
        if self._current is self._shared:
            self._current = None
        self._shared = None

    def get_views(self, layouts: tuple[GradientLayout, ...]) -> list[Tensor]:
        """Return views of consecutive pieces of the memory in the given layouts."""
        assert self._current is not None, "renew has not been called"
        return self._current.get_views(layouts)


class StagingMemory:
    """Two flat tensors per dtype and device that buckets use in turn, so that one fills while the other is sent.

    They lie in memory that workers share, if there is any: workers then read each other's, and copy nothing in.
    """

    def __init__(self) -> None:
        self._flats: dict[Hashable, Tensor] = {}
        self._users: dict[Hashable, Callable[[], None]] = {}
        self._next = 0

    def take(self, size: int, like: Tensor, wait: Callable[[], None], *, among: WorkerGroup) -> Tensor:
        """Return memory, once the collective of its user before is done. All workers call this in the same order.

        Args:
            wait: Waits for the new user's collective, and forgets it, because backends keep memory while it is known.
            among: The workers that sum what it puts there.
        """
        self._next = 1 - self._next
        key = self._next, like.dtype, like.device, among.group
        if key in self._users:
            with suppress(RuntimeError):  # its user raises it, if that still needs the result
                self._users[key]()
        self._users[key] = wait
        if key not in self._flats or self._flats[key].numel() < size:
            self._flats.pop(key, None)  # before the new memory
            shared = allocate_reduced(size, like.dtype, like.device, among=among, on_close=self.release)
            self._flats[key] = like.new_empty(size) if shared is None else shared
        return self._flats[key][:size]

    def release(self) -> None:
        """Give up the memory: workers do not share it any more."""
        self._flats.clear()


class GradientMemory:
    """The bucket memory of a job. Its programs share it, because one runs at a time."""

    def __init__(self) -> None:
        self.staging = StagingMemory()
        """Where whole gradients are put together before each worker gets its pieces of the sum."""
        self._flats: dict[Hashable, FlatMemory] = {}

    def get(self, number: int, size: int, like: LogicalValue, *, among: WorkerGroup | None = None) -> FlatMemory:
        """Return the memory of a bucket.

        Args:
            among: The workers that reduce all of it. Default: none do.
        """
        group = None if among is None else among.group
        key = number, size, like.dtype, like.device, group
        if key not in self._flats:
            share = partial(_share, size, like.dtype, like.device, among)
            self._flats[key] = FlatMemory(size, like.dtype, like.device, share)
        return self._flats[key]


def _share(
    size: int, dtype: torch.dtype, device: torch.device, among: WorkerGroup | None, on_close: Callable[[], None]
) -> Tensor | None:
    return None if among is None else allocate_reduced(size, dtype, device, among=among, on_close=on_close)


@dataclass(frozen=True)
class EnsureOwnMemory:
    """Called with a gradient that is in no bucket, returns it in its layout and in memory of its own."""

    layout: GradientLayout
    is_shared: bool
    """Whether another value may have the gradient's memory."""

    __name__ = "own_memory"

    def __call__(self, value: Tensor) -> Tensor:
        """Return the gradient itself if it has both already, otherwise a copy."""
        if value.layout is not torch.strided:
            return value
        is_whole = value.untyped_storage().nbytes() == value.nbytes
        if is_whole and not self.is_shared and value.stride() == self.layout.strides:
            return value
        return value.new_empty_strided(self.layout.shape, self.layout.strides).copy_(value)


SMALL_GROUP_BYTES, LARGE_GROUP_BYTES = 2**20, 25 * 2**20
GROUPS = 24
"""Groups of a model whose size lies between these."""


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """The placements of states between calls, by name. States without one are whole.

    Programs use those in `shardings` as they are stored. Of those in `values` they use what the workers along one axis
    have together: passes after lowering gather those that workers do not share, and scatter gradients.
    """

    axis: MeshAxis | None = None
    values: Mapping[str, Shard] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    """The values that a program reads whole in memory that workers share: the number of the memory of each."""
    gradients: Mapping[str, Shard] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """The shardings of states whose pieces a program uses, and whose gradients it returns in pieces."""
    ranks: tuple[int, ...] = ()
    """This worker's rank along each axis of these shardings."""
    owned: Mapping[str, Shard] = field(default_factory=dict)
    """The states that only the worker of their stage has, with their gradients, as the axis `pipeline` divides them."""
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The workers along the axis `pipeline` that have copies of these states; see Note [copies of shards]."""
    memory: GradientMemory = field(default_factory=GradientMemory)
    """The memory of gradients, which the programs of a job share."""

    def with_new_memory(self) -> "StateStorage":
        """Return the same placements with other memory of gradients."""
        return replace(self, memory=GradientMemory())

    def find_own_layout(self, name: str, parameter: LogicalValue) -> GradientLayout:
        """Return the layout in which a program computes a parameter's gradient."""
        if name not in self.shardings:
            return find_gradient_layout(parameter)
        shape = self.get_own_shape(name, parameter)
        return GradientLayout(shape, make_dense_strides(shape, order_dims(parameter.strides)))

    def get_own_shape(self, name: str, value: LogicalValue) -> tuple[int, ...]:
        """Return the shape of what a program uses of a state, or computes of its gradient."""
        sharding = self.shardings.get(name)
        return tuple(value.shape if sharding is None else compute_local_shape(value.shape, sharding, self.ranks))

    def get_shard_shape(self, name: str, value: LogicalValue, stage_worker: int) -> tuple[int, ...]:
        """Return the shape of what a worker holds of a gradient.

        Args:
            stage_worker: The worker's rank along the axis `pipeline`.
        """
        shape = list(self.get_own_shape(name, value))
        owned, placement = self.owned.get(name), self.gradients.get(name)
        if owned is not None:
            is_copy = stage_worker in self.copies.get(name, ())
            shape[owned.dim] = max(owned.lengths) if is_copy else owned.lengths[stage_worker]
        if placement is not None and self.axis is not None:
            shape[placement.dim] = placement.lengths[self.axis.rank]
        return tuple(shape)

    def find_owner(self, name: str) -> int | None:
        """Return the worker along the axis `pipeline` that alone has rows of a state.

        None: it has none either, because another axis has given them to other workers.
        """
        return next((worker for worker, length in enumerate(self.owned[name].lengths) if length), None)

    def make_layout(self, name: str, value: LogicalValue, placement: Shard) -> ShardLayout:
        """Return how what a program uses of a dense state is divided between the workers along the axis."""
        shape = tuple(map(int, self.get_own_shape(name, value)))
        return ShardLayout(shape, order_dims(value.strides), placement)

    def find_gradient_layout(self, program: LogicalProgram, name: str, value: LogicalValue) -> ShardLayout | None:
        """Return how the gradient of a parameter is divided; None for a whole one."""
        placement = self.gradients.get(name)
        if placement is None:
            return None
        parameters = {described.name: node.meta["val"] for node, described in program.inputs.items()}
        return self.make_layout(name, parameters.get(name, value), placement)


def limit_group(sizes: Sequence[int]) -> int:
    """Return the most bytes of parameters, or of gradients, that are whole in one group.

    A group is small against all of them, because the memory of a group is what is saved for all others, but not so
    small that collectives cost more than what they send.
    """
    return min(LARGE_GROUP_BYTES, max(SMALL_GROUP_BYTES, *sizes, sum(sizes) // GROUPS))
