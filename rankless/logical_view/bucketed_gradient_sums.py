"""Sums of the gradients of plain leaves over the ranks, in buckets, while the backward pass goes on.

This is the scheme of PyTorch's DistributedDataParallel (Li et al., VLDB 2020); see also
`rankless.compiler.scheduling.gradient_buckets`. A bucket holds gradients that arrive one after the other. Its sum
starts with the last of them, and the pass waits for all sums at its end.

Note [order of leaves]: all ranks must put the same gradients into a bucket. They make the same calls, so autograd
numbers the calls alike, and the first call that uses a leaf gives the leaf its place. A call of one rank may be one
operator, and several on another one. Within a call, operators and their arguments come in the order of the function.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.mesh_collectives import await_end, start_all_reduce, start_reduce_scatter
from rankless.compiler.scheduling.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from rankless.compiler.sharding.redistribute import Redistribution
from rankless.logical_view.call_observers import OBSERVERS, send_move
from rankless.logical_view.gradient_shards import GradientShards, add_to_shard
from rankless.logical_view.redistribution import move, move_with_gradient
from rankless.ownership.shard_layout import ShardGroup, ShardLayout, group_in_order
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

POST_HOOK = Tensor.register_post_accumulate_grad_hook
LEAF_NODE: type = type(torch.ones(1, requires_grad=True, device="cpu").view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
"""The class of the nodes at which gradients of leaves arrive."""


class LeafBucket:
    """Leaves whose gradients are summed together.

    Args:
        leaves: The leaves, of one dtype and device. Either all gradients are divided, or none is.
        shards: Knows the ranks, and whose gradients are divided.
    """

    def __init__(self, leaves: Sequence[Tensor], shards: GradientShards) -> None:
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self._missing = set(self._leaves)
        self._axis = shards.axis
        self._shards = shards
        self._sums: Sequence[Tensor] = ()
        self._work: dist.Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have arrived."""
        return not self._missing

    def note(self, leaf: Tensor) -> None:
        """Note that a gradient has arrived. A sparse one is summed by itself."""
        self._missing.discard(id(leaf))
        if leaf.grad is not None and leaf.grad.is_sparse:
            self._leaves.pop(id(leaf), None)

    def start(self) -> None:
        """Take the gradients of the leaves, and start to sum them."""
        gradients = []
        for leaf in self._leaves.values():
            assert leaf.grad is not None
            gradients.append(leaf.grad)
            leaf.grad = None
        layouts = [layout for leaf in self._leaves.values() if (layout := self._shards.find(leaf)) is not None]
        if layouts:
            self._start_on_shards(gradients, layouts)
        elif gradients:
            flat, self._sums = copy_together(gradients)
            self._send_move(flat, Replicate())
            self._work = start_all_reduce(flat, among=self._axis)

    def _start_on_shards(self, gradients: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> None:
        """Start to sum gradients of which this rank gets its shard."""
        group = ShardGroup(tuple(layouts), self._axis.size)
        flat = gradients[0].new_empty(group.flat_size)
        group.join_wholes([gradient.detach() for gradient in gradients], flat)
        chunk = flat.new_empty(group.chunk_size)
        shards = group.view_shards(chunk, self._axis.rank)
        self._sums = [self._shards.show(layout, shard.data) for layout, shard in zip(layouts, shards, strict=True)]
        self._send_move(flat, Shard(0, (group.chunk_size,) * self._axis.size))
        self._work = start_reduce_scatter(chunk, flat, among=self._axis)

    def _send_move(self, flat: Tensor, placement: Placement) -> None:
        if OBSERVERS:
            target = Redistribution(self._axis, Partial(), placement)
            send_move(flat, target, flat.shape, list(self._leaves.values()))

    def finish(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the sums, and return the leaves with these."""
        if self._work is not None:
            self._work.wait()
        return list(zip(self._leaves.values(), self._sums, strict=False))

    def drop(self) -> None:
        """Wait for the sums of a pass that an exception has ended."""
        if self._work is not None:
            await_end(self._work)


class GradientPass:
    """One backward pass: the plain leaves, their earlier gradients, and the sums of the new ones.

    Args:
        shards: Knows the ranks, and whose gradients are divided.
        create_graph: Whether the gradients will be differentiated.
    """

    def __init__(self, shards: GradientShards, *, create_graph: bool) -> None:
        self._axis = shards.axis
        self._shards = shards
        self._create_graph = create_graph
        self._leaves: dict[int, Tensor] = {}
        self._earlier: dict[int, Tensor | None] = {}
        self._buckets: list[LeafBucket] = []
        self._bucket_of: dict[int, LeafBucket] = {}
        self._started = 0
        self._hooks: list[Any] = []

    def add(self, leaves: Sequence[Tensor], *, overlaps: bool) -> None:
        """Take away the earlier gradients of leaves that are no parts of logical tensors.

        Args:
            leaves: The leaves, in the order in which they are first used.
            overlaps: Whether their sums may start when they arrive. A checkpoint reads what it computes itself.
        """
        new = [leaf for leaf in reversed(leaves) if id(leaf) not in self._leaves and not hasattr(leaf, "is_part")]
        for leaf in new:
            self._leaves[id(leaf)] = leaf
            self._earlier[id(leaf)], leaf.grad = leaf.grad, None
        if self._create_graph or not overlaps:
            return
        without_hooks = [leaf for leaf in new if leaf.is_leaf and not leaf._post_accumulate_grad_hooks]
        for bucket, group in self._group(without_hooks):
            self._buckets.append(bucket)
            for leaf in group:
                self._bucket_of[id(leaf)] = bucket
                self._hooks.append(POST_HOOK(leaf, self._note))  # type: ignore[no-untyped-call]

    def _group(self, leaves: Sequence[Tensor]) -> list[tuple[LeafBucket, list[Tensor]]]:
        groups = group_in_order(
            leaves,
            kind=lambda leaf: (leaf.dtype, leaf.device, self._shards.find(leaf) is None),
            size=lambda leaf: leaf.numel() * leaf.element_size(),
            limit=lambda _, count: FIRST_BUCKET_BYTES if count == 1 else BUCKET_BYTES,
        )
        return [(LeafBucket(group, self._shards), group) for group in groups]

    def _note(self, leaf: Tensor) -> None:
        """Note that a gradient has arrived. Buckets start in one order on all ranks."""
        self._bucket_of[id(leaf)].note(leaf)
        while self._started < len(self._buckets) and self._buckets[self._started].is_complete:
            self._buckets[self._started].start()
            self._started += 1

    def complete(self, leaf: Tensor) -> None:
        """Make the gradient of a leaf whole before the pass ends, because a hook of the script uses it."""
        if id(leaf) in self._leaves and leaf.grad is not None:
            gradient, leaf.grad = self._sum(leaf.grad), self._earlier[id(leaf)]
            self._accumulate(leaf, gradient)

    def suspend(self, leaf: Tensor) -> None:
        """Take the whole gradient away again. The pass may compute another term of it."""
        if id(leaf) in self._leaves:
            self._earlier[id(leaf)], leaf.grad = leaf.grad, None

    def finish(self) -> None:
        """Wait for all sums, sum what is in no bucket, and add the sums to the earlier gradients."""
        self._remove_hooks()
        # What is in a leaf whose bucket has started is another term, as of a checkpoint.
        rest = [leaf for leaf in self._leaves.values() if leaf.grad is not None]
        alone = [leaf for leaf in rest if self._create_graph or leaf.grad.is_sparse]  # type: ignore[union-attr]
        known = set(map(id, alone))
        late = [bucket for bucket, _ in self._group([leaf for leaf in rest if id(leaf) not in known])]
        for bucket in late:
            bucket.start()
        summed = [(leaf, self._sum(leaf.grad)) for leaf in alone if leaf.grad is not None]
        for leaf in self._leaves.values():
            leaf.grad = self._earlier[id(leaf)]
        for bucket in (*self._buckets[: self._started], *late):
            summed += bucket.finish()
        for leaf, gradient in summed:
            self._accumulate(leaf, gradient)

    def undo(self) -> None:
        """Give the leaves their earlier gradients: an exception has ended the pass."""
        self._remove_hooks()
        for bucket in self._buckets[: self._started]:
            bucket.drop()
        for leaf in self._leaves.values():
            leaf.grad = self._earlier[id(leaf)]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _sum(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over the ranks."""
        shape = tuple(gradient.shape)
        if self._create_graph:
            return move_with_gradient(gradient, self._axis, shape, Partial(), Replicate())
        return move(gradient.detach(), self._axis, shape, Partial(), Replicate())

    def _accumulate(self, leaf: Tensor, new: Tensor) -> None:
        """Add a new gradient to the earlier one: in place, unless the new one has gradients itself."""
        before = leaf.grad
        if before is None:
            leaf.grad = new
        elif self._create_graph or (before.is_sparse and not new.is_sparse):
            leaf.grad = new + before
        elif not add_to_shard(before, new):
            with torch.no_grad(), torch._C._EnableTorchFunction():  # a divided one is gathered
                before.add_(new)


def copy_together(gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return memory with copies of gradients, and the copies: tensors of their own over this memory."""
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    copies, start = [], 0
    for gradient in gradients:
        strides = gradient.stride() if gradient.is_contiguous() else torch.empty_like(gradient, device="meta").stride()
        copies.append(flat.as_strided(gradient.shape, strides, start).data)
        start += gradient.numel()
    torch._foreach_copy_(copies, [gradient.detach() for gradient in gradients])
    return flat, copies


def find_leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradients a backward pass computes; see Note [order of leaves]."""
    places: dict[Any, tuple[int, int]] = {}
    seen: set[Any] = set()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for number, (source, _) in enumerate(node.next_functions):
            if type(source) is LEAF_NODE:
                place = node._sequence_nr(), number
                places[source] = min(place, places.get(source, place))
            elif source is not None and source not in seen:
                waiting.append(source)
    ordered = [source.variable for source in sorted(places, key=places.__getitem__)]
    return [root for root in roots if root.is_leaf and root.requires_grad] + ordered
