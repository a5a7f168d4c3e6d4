"""Random operations of a process group: how a worker makes them, and what they must give.

Every input follows from the operation and a rank, so each worker computes what all others pass, and with it the
expected result: reductions combine the inputs in the order of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = ["float64", "float32", "float16", "bfloat16"]
WHOLE = ["int64", "int32", "int16", "int8", "uint8", "bool"]
COMPLEX = ["complex64", "complex128"]
REDUCTIONS: dict[str, tuple[Any, Callable[..., Tensor], list[str]]] = {
    "sum": (ReduceOp.SUM, torch.add, [*FLOATS, *WHOLE, *COMPLEX]),
    "avg": (ReduceOp.AVG, torch.add, FLOATS),
    "product": (ReduceOp.PRODUCT, torch.mul, [*FLOATS, *WHOLE]),
    "min": (ReduceOp.MIN, torch.minimum, [*FLOATS, *WHOLE]),
    "max": (ReduceOp.MAX, torch.maximum, [*FLOATS, *WHOLE]),
    "band": (ReduceOp.BAND, torch.bitwise_and, WHOLE),
    "bor": (ReduceOp.BOR, torch.bitwise_or, WHOLE),
    "bxor": (ReduceOp.BXOR, torch.bitwise_xor, WHOLE),
}
REDUCING = ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single"]
MOVING = [
    *("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("barrier", "send", "send any"),
]
LAYOUTS = ["plain", "transposed", "strided"]
GLOO_DTYPES = {"float64", "float32", "float16", "int64", "int32", "int8", "uint8"}


@dataclass(frozen=True)
class Operation:
    """An operation of a group: what is called, with which values, and when the worker waits for it."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    reduction: str
    layout: str
    root: int
    is_uneven: bool
    is_asynchronous: bool
    waits_for_all: bool
    seed: int
    tag: int = 2
    """Of messages from any rank. Two operations with the same tag could receive each other's messages."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@st.composite
def operations(draw: Any, largest: int = 300_000) -> Operation:
    """Draw an operation. `largest` is the most values of a rank's tensor."""
    kind = draw(st.sampled_from([*REDUCING, *MOVING]))
    reduction = draw(st.sampled_from(sorted(REDUCTIONS)))
    dtypes = REDUCTIONS[reduction][2] if kind in REDUCING else [*FLOATS, *WHOLE, *COMPLEX]
    shapes = st.one_of(
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
        st.tuples(st.integers(1, largest // 7), st.just(7)),
    )
    return Operation(
        kind=kind,
        dtype=draw(st.sampled_from(dtypes)),
        shape=draw(shapes),
        reduction=reduction,
        layout=draw(st.sampled_from(LAYOUTS)),
        root=draw(st.integers(0, 7)),
        is_uneven=draw(st.booleans()),
        is_asynchronous=draw(st.booleans()),
        waits_for_all=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def make_input(operation: Operation, rank: int, part: int = 0, more_rows: int = 0) -> Tensor:
    """Return a plain input of a rank: small whole numbers, or any floats if the seed is odd."""
    shape = (operation.shape[0] + more_rows, *operation.shape[1:]) if operation.shape and more_rows else operation.shape
    generator = torch.Generator().manual_seed(operation.seed * 1009 + rank * 31 + part)
    if operation.seed % 2 and operation.torch_dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(operation.torch_dtype)
    return torch.randint(0, 3, shape, generator=generator).to(operation.torch_dtype)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor with the same values and other strides."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    if layout == "strided":
        wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    return tensor.clone()


def reduce_in_order(operation: Operation, tensors: list[Tensor]) -> Tensor:
    """Combine the tensors of all ranks, one after the other."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = REDUCTIONS[operation.reduction][1](total, tensor)
    return total / len(tensors) if operation.reduction == "avg" and len(tensors) > 1 else total


@dataclass(frozen=True)
class Started:
    """An operation that a worker has started: what to wait for, what it writes, and what must be there."""

    operation: Operation
    works: list[Any]
    written: list[Tensor]
    expected: list[Tensor]

    def finish(self) -> None:
        """Wait, and compare."""
        for work in self.works:
            if work is not None:
                assert work.wait()
        for index, (found, expected) in enumerate(zip(self.written, self.expected, strict=True)):
            assert torch.equal(found, expected), f"{self.operation}, output {index}"


def start(operation: Operation, group: Any, rank: int, size: int, layout: str) -> Started:
    """Start an operation on a group, with tensors of a layout."""
    written, expected, arguments = STARTS[operation.kind](operation, rank, size, layout)
    options: dict[str, Any] = {"group": group}
    if operation.kind not in ("send", "send any"):
        options["async_op"] = operation.is_asynchronous
    called = arguments.pop(0)
    works = called(*arguments, **options)
    return Started(operation, works if isinstance(works, list) else [works], written, expected)


Prepared = tuple[list[Tensor], list[Tensor], list[Any]]


def _rows(operation: Operation, rank: int) -> int:
    return rank if operation.is_uneven and operation.shape else 0


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)


def _start_all_reduce(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    expected = reduce_in_order(operation, [make_input(operation, peer) for peer in range(size)])
    mine = lay_out(make_input(operation, rank), layout)
    op = REDUCTIONS[operation.reduction][0]
    return [mine], [expected], [lambda **options: dist.all_reduce(mine, op, **options)]


def _start_all_reduce_coalesced(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    expected = [
        reduce_in_order(operation, [make_input(operation, peer, part, part) for peer in range(size)]) for part in (0, 1)
    ]
    mine = [lay_out(make_input(operation, rank, part, part), layout) for part in (0, 1)]
    op = REDUCTIONS[operation.reduction][0]

    def call(group: Any, async_op: bool) -> Any:
        with dist.distributed_c10d._coalescing_manager(group, async_ops=async_op) as manager:
            for tensor in mine:
                dist.all_reduce(tensor, op, group=group)
        return list(manager.works)

    return mine, expected, [call]


def _start_reduce(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    root = operation.root % size
    expected = reduce_in_order(operation, [make_input(operation, peer) for peer in range(size)])
    mine = lay_out(make_input(operation, rank), layout)
    op = REDUCTIONS[operation.reduction][0]
    expected = expected if rank == root else mine.clone()
    return [mine], [expected], [lambda **options: dist.reduce(mine, None, op, group_dst=root, **options)]


def _start_reduce_scatter(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    pieces = [
        [make_input(operation, peer, part, _rows(operation, part)) for part in range(size)] for peer in range(size)
    ]
    expected = reduce_in_order(operation, [inputs[rank] for inputs in pieces])
    into = lay_out(torch.zeros_like(expected), layout)
    mine = [lay_out(piece, layout) for piece in pieces[rank]]
    op = REDUCTIONS[operation.reduction][0]
    return [into], [expected], [lambda **options: dist.reduce_scatter(into, mine, op, **options)]


def _start_reduce_scatter_single(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    pieces = [[make_input(operation, peer, part) for part in range(size)] for peer in range(size)]
    expected = reduce_in_order(operation, [inputs[rank] for inputs in pieces])
    into, mine = lay_out(torch.zeros_like(expected), layout), lay_out(_join(pieces[rank]), layout)
    op = REDUCTIONS[operation.reduction][0]
    return [into], [expected], [lambda **options: dist.reduce_scatter_single(into, mine, op, **options)]


def _start_broadcast(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    root = operation.root % size
    mine = lay_out(make_input(operation, rank), layout)
    return [mine], [make_input(operation, root)], [lambda **options: dist.broadcast(mine, group_src=root, **options)]


def _start_all_gather(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    expected = [make_input(operation, peer, 0, _rows(operation, peer)) for peer in range(size)]
    into = [lay_out(torch.zeros_like(tensor), layout) for tensor in expected]
    mine = lay_out(expected[rank], layout)
    return into, expected, [lambda **options: dist.all_gather(into, mine, **options)]


def _start_all_gather_single(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    inputs = [make_input(operation, peer) for peer in range(size)]
    expected = _join(inputs)
    into, mine = lay_out(torch.zeros_like(expected), layout), lay_out(inputs[rank], layout)
    return [into], [expected], [lambda **options: dist.all_gather_single(into, mine, **options)]


def _start_gather(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    root = operation.root % size
    expected = [make_input(operation, peer) for peer in range(size)]
    mine = lay_out(expected[rank], layout)
    into = [lay_out(torch.zeros_like(tensor), layout) for tensor in expected] if rank == root else []
    call = [lambda **options: dist.gather(mine, into or None, group_dst=root, **options)]
    return into, expected if rank == root else [], call


def _start_scatter(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    root = operation.root % size
    pieces = [make_input(operation, root, part) for part in range(size)]
    given = [lay_out(piece, layout) for piece in pieces] if rank == root else None
    into = lay_out(torch.zeros_like(pieces[rank]), layout)
    return [into], [pieces[rank]], [lambda **options: dist.scatter(into, given, group_src=root, **options)]


def _start_all_to_all(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    def piece(source: int, target: int) -> Tensor:
        return make_input(operation, source, target, _rows(operation, (source + target) % size))

    expected = [piece(source, rank) for source in range(size)]
    into = [lay_out(torch.zeros_like(tensor), layout) for tensor in expected]
    sent = [lay_out(piece(rank, target), layout) for target in range(size)]
    return into, expected, [lambda **options: dist.all_to_all(into, sent, **options)]


def _start_all_to_all_single(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    def piece(source: int, target: int) -> Tensor:
        tensor = make_input(operation, source, target, _rows(operation, (source + 2 * target) % size))
        return tensor if operation.is_uneven and operation.shape else tensor.unsqueeze(0)

    arriving = [piece(source, rank) for source in range(size)]
    leaving = [piece(rank, target) for target in range(size)]
    into, sent = lay_out(torch.zeros_like(torch.cat(arriving)), layout), lay_out(torch.cat(leaving), layout)
    splits = ([len(one) for one in arriving], [len(one) for one in leaving]) if operation.is_uneven else (None, None)
    return [into], [torch.cat(arriving)], [lambda **options: dist.all_to_all_single(into, sent, *splits, **options)]


def _start_barrier(*_: Any) -> Prepared:
    return [], [], [lambda **options: dist.barrier(**options)]


def _start_send(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    """Each rank sends two messages to the next rank, which receives them in the other order, by their tags."""
    before, after = (rank - 1) % size, (rank + 1) % size
    sent = [lay_out(make_input(operation, rank, part), layout) for part in (0, 1)]
    expected = [make_input(operation, before, part) for part in (0, 1)]
    into = [lay_out(torch.zeros_like(tensor), layout) for tensor in expected]

    def call(group: Any) -> list[Any]:
        sending = [dist.isend(tensor, group=group, group_dst=after, tag=tag) for tag, tensor in enumerate(sent)]
        receiving = [dist.irecv(into[tag], group=group, group_src=before, tag=tag) for tag in (1, 0)]
        return [*receiving, *sending]

    return into, expected, [call]


def _start_send_any(operation: Operation, rank: int, size: int, layout: str) -> Prepared:
    """All ranks send to the root, which receives from any rank."""
    root = operation.root % size
    others = [peer for peer in range(size) if peer != root]
    into = [lay_out(torch.zeros(operation.shape, dtype=operation.torch_dtype), layout) for _ in others]
    expected = [torch.zeros(operation.shape, dtype=operation.torch_dtype) for _ in others]

    def call(group: Any) -> list[Any]:
        if rank != root:
            return [
                dist.isend(lay_out(make_input(operation, rank), layout), group=group, group_dst=root, tag=operation.tag)
            ]
        works = [dist.irecv(tensor, group=group, tag=operation.tag) for tensor in into]
        for work, tensor in zip(works, expected, strict=True):
            work.wait()
            tensor.copy_(make_input(operation, work._source_rank()))
        assert sorted(work._source_rank() for work in works) == others
        return works

    return (into, expected, [call]) if rank == root else ([], [], [call])


STARTS: dict[str, Callable[[Operation, int, int, str], Prepared]] = {
    "all_reduce": _start_all_reduce,
    "all_reduce_coalesced": _start_all_reduce_coalesced,
    "reduce": _start_reduce,
    "reduce_scatter": _start_reduce_scatter,
    "reduce_scatter_single": _start_reduce_scatter_single,
    "broadcast": _start_broadcast,
    "all_gather": _start_all_gather,
    "all_gather_single": _start_all_gather_single,
    "gather": _start_gather,
    "scatter": _start_scatter,
    "all_to_all": _start_all_to_all,
    "all_to_all_single": _start_all_to_all_single,
    "barrier": _start_barrier,
    "send": _start_send,
    "send any": _start_send_any,
}
