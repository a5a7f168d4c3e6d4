"""Every collective: how a process runs it, and what one process computes from the inputs of all ranks.

Inputs are small whole numbers, so that every reduction of every dtype is exact. `run` returns what the rank holds
afterwards. `expected` computes the same from the inputs of all ranks; it is empty if the result is undefined there.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import rankless.collectives as collectives
from rankless.parallel.mesh import Mesh

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int8, torch.uint8]
MOVED = [*FLOATS, *WHOLE, torch.bool, torch.complex64]
REDUCTIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor], list[torch.dtype]]] = {
    "sum": (ReduceOp.SUM, torch.add, [*FLOATS, *WHOLE, torch.complex64]),
    "product": (ReduceOp.PRODUCT, torch.mul, [*FLOATS, *WHOLE]),
    "min": (ReduceOp.MIN, torch.minimum, [*FLOATS, *WHOLE]),
    "max": (ReduceOp.MAX, torch.maximum, [*FLOATS, *WHOLE]),
    "band": (ReduceOp.BAND, torch.bitwise_and, WHOLE),
    "bor": (ReduceOp.BOR, torch.bitwise_or, WHOLE),
    "bxor": (ReduceOp.BXOR, torch.bitwise_xor, WHOLE),
}
AVERAGED = [torch.float64, torch.float32]


@dataclass(frozen=True)
class Caller:
    """A process that calls a collective: its rank, its group, and whether it calls asynchronously."""

    rank: int
    size: int
    group: Any
    asynchronous: bool
    device: torch.device

    def done(self, work: Any) -> None:
        """Wait for an asynchronous call; assert that another call has waited."""
        assert (work is not None) == self.asynchronous
        if work is not None:
            work.wait()
            assert work.is_completed()


def make_input(rank: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Return the input of a rank."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 3, shape, generator=generator, device="cpu").to(dtype)


def reduce_on_one_process(name: str, tensors: list[Tensor]) -> Tensor:
    """Reduce all ranks' tensors in one process."""
    if name == "avg":
        return functools.reduce(torch.add, tensors) / len(tensors)
    return functools.reduce(REDUCTIONS[name][1], tensors).to(tensors[0].dtype)


def reduction_op(name: str) -> Any:
    return ReduceOp.AVG if name == "avg" else REDUCTIONS[name][0]


Shape = tuple[int, ...]


def run(case: str, caller: Caller, dtype: torch.dtype, shape: Shape) -> list[Tensor]:
    """Call the collective, and return the tensors that it has written."""
    name, _, how = case.partition(" ")
    mine = make_input(caller.rank, dtype, shape).to(caller.device)
    options: dict[str, Any] = {"group": caller.group, "async_op": caller.asynchronous}
    found = RUNS[name](caller, mine, how, options)
    return [tensor.cpu() for tensor in found]


def extra_rows(rank: int, how: str) -> int:
    """Return how many extra rows a rank has if sizes are uneven."""
    return rank if how == "uneven" else 0


def repeat_rows(tensor: Tensor, more: int) -> Tensor:
    """Return a tensor with one more dim, of 1 + `more` equal rows."""
    return tensor.unsqueeze(0).repeat(1 + more, *([1] * tensor.dim()))


def run_broadcast(caller: Caller, mine: Tensor, _how: str, options: dict[str, Any]) -> list[Tensor]:
    caller.done(collectives.broadcast(mine, group_src=caller.size - 1, **options))
    return [mine]


def run_all_reduce(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    caller.done(collectives.all_reduce(mine, reduction_op(how), **options))
    return [mine]


def run_reduce(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    caller.done(collectives.reduce(mine, None, reduction_op(how), group_dst=1, **options))
    return [mine] if caller.rank == 1 else []


def run_all_gather(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    into = [torch.zeros_like(repeat_rows(mine, extra_rows(rank, how))) for rank in range(caller.size)]
    caller.done(collectives.all_gather(into, repeat_rows(mine, extra_rows(caller.rank, how)), **options))
    return into


def run_all_gather_single(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    whole = torch.zeros_like(repeat_rows(mine, caller.size - 1))
    called = collectives.all_gather_into_tensor if how == "old name" else collectives.all_gather_single
    caller.done(called(whole, mine if how == "stacked" else repeat_rows(mine, 0), **options))
    return [whole]


def run_gather(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    into = None
    if caller.rank == 1:
        into = [torch.zeros_like(repeat_rows(mine, extra_rows(rank, how))) for rank in range(caller.size)]
    caller.done(collectives.gather(repeat_rows(mine, extra_rows(caller.rank, how)), into, group_dst=1, **options))
    return into or []


def run_scatter(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    given_list = None
    if caller.rank == 1:
        given_list = [
            repeat_rows(mine + rank if mine.dtype != torch.bool else mine, extra_rows(rank, how))
            for rank in range(caller.size)
        ]
    into = torch.zeros_like(repeat_rows(mine, extra_rows(caller.rank, how)))
    caller.done(collectives.scatter(into, given_list, group_src=1, **options))
    return [into]


def run_reduce_scatter(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    kind, _, uneven = how.partition(" ")
    pieces = [repeat_rows(mine * (rank + 1), extra_rows(rank, uneven)) for rank in range(caller.size)]
    into = torch.zeros_like(pieces[caller.rank])
    caller.done(collectives.reduce_scatter(into, pieces, reduction_op(kind), **options))
    return [into]


def run_reduce_scatter_single(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    kind, _, form = how.partition(" ")
    whole = torch.stack([mine * (rank + 1) for rank in range(caller.size)])
    into = torch.zeros_like(whole[0] if form == "stacked" else whole[:1])
    called = collectives.reduce_scatter_tensor if form == "old name" else collectives.reduce_scatter_single
    caller.done(called(into, whole, reduction_op(kind), **options))
    return [into.reshape(whole[:1].shape)]


def run_all_to_all(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    sent = [repeat_rows(mine, extra_rows(rank + caller.rank, how)) for rank in range(caller.size)]
    into = [torch.zeros_like(repeat_rows(mine, extra_rows(rank + caller.rank, how))) for rank in range(caller.size)]
    caller.done(collectives.all_to_all(into, sent, **options))
    return into


def run_all_to_all_single(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    lengths = [1 + extra_rows(rank + caller.rank, how) for rank in range(caller.size)]
    sent = torch.cat([repeat_rows(mine, length - 1) for length in lengths])
    into = torch.zeros_like(sent)
    splits = (lengths, lengths) if how == "uneven" else (None, None)
    caller.done(collectives.all_to_all_single(into, sent, *splits, **options))
    return [into]


def run_all_reduce_coalesced(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    tensors = [mine, repeat_rows(mine, 2)]
    caller.done(collectives.all_reduce_coalesced(tensors, reduction_op(how), **options))
    return tensors


def run_all_gather_coalesced(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    into = [
        [torch.zeros_like(mine), torch.zeros_like(repeat_rows(mine, 1 + extra_rows(rank, how)))]
        for rank in range(caller.size)
    ]
    tensors = [mine, repeat_rows(mine, 1 + extra_rows(caller.rank, how))]
    caller.done(collectives.all_gather_coalesced(into, tensors, **options))
    return [tensor for tensors in into for tensor in tensors]


def run_send(caller: Caller, mine: Tensor, how: str, options: dict[str, Any]) -> list[Tensor]:
    """Each rank sends to the next one, in a ring."""
    into = torch.zeros_like(mine)
    following, before = (caller.rank + 1) % caller.size, (caller.rank - 1) % caller.size
    group = options["group"]
    if options["async_op"] and how == "batch":
        operations = [
            collectives.P2POp(collectives.isend, mine, group=group, group_peer=following),
            collectives.P2POp(collectives.irecv, into, group=group, group_peer=before),
        ]
        works = collectives.batch_isend_irecv(operations)
        assert len(works) == 2
    elif options["async_op"]:
        works = [
            collectives.isend(mine, group=group, group_dst=following, tag=3),
            collectives.irecv(into, group=group, group_src=before, tag=3),
        ]
    else:
        works = []
        calls: list[Callable[[], Any]] = [
            lambda: collectives.send(mine, group=group, group_dst=following),
            lambda: collectives.recv(into, group=group, **({} if how == "any" else {"group_src": before})),
        ]
        for call in calls if caller.rank % 2 == 0 else reversed(calls):
            call()
    for work in works:
        work.wait()
    return [into]


RUNS: dict[str, Callable[[Caller, Tensor, str, dict[str, Any]], list[Tensor]]] = {
    "broadcast": run_broadcast,
    "all_reduce": run_all_reduce,
    "reduce": run_reduce,
    "all_gather": run_all_gather,
    "all_gather_single": run_all_gather_single,
    "gather": run_gather,
    "scatter": run_scatter,
    "reduce_scatter": run_reduce_scatter,
    "reduce_scatter_single": run_reduce_scatter_single,
    "all_to_all": run_all_to_all,
    "all_to_all_single": run_all_to_all_single,
    "all_reduce_coalesced": run_all_reduce_coalesced,
    "all_gather_coalesced": run_all_gather_coalesced,
    "send": run_send,
}


def expected(case: str, rank: int, size: int, dtype: torch.dtype, shape: Shape) -> list[Tensor]:
    """Return what `run` returns on a rank, computed by one process."""
    name, _, how = case.partition(" ")
    inputs = [make_input(each, dtype, shape) for each in range(size)]
    if name == "broadcast":
        return [inputs[size - 1]]
    if name == "all_reduce":
        return [reduce_on_one_process(how, inputs)]
    if name == "reduce":
        return [reduce_on_one_process(how, inputs)] if rank == 1 else []
    if name == "all_gather":
        return [repeat_rows(tensor, extra_rows(each, how)) for each, tensor in enumerate(inputs)]
    if name == "all_gather_single":
        return [torch.stack(inputs)]
    if name == "gather":
        return [repeat_rows(tensor, extra_rows(each, how)) for each, tensor in enumerate(inputs)] if rank == 1 else []
    if name == "scatter":
        return [repeat_rows(inputs[1] + rank if dtype != torch.bool else inputs[1], extra_rows(rank, how))]
    if name == "reduce_scatter":
        kind, _, uneven = how.partition(" ")
        return [
            repeat_rows(
                reduce_on_one_process(kind, [tensor * (rank + 1) for tensor in inputs]), extra_rows(rank, uneven)
            )
        ]
    if name == "reduce_scatter_single":
        return [
            repeat_rows(reduce_on_one_process(how.partition(" ")[0], [tensor * (rank + 1) for tensor in inputs]), 0)
        ]
    if name == "all_to_all":
        return [repeat_rows(tensor, extra_rows(rank + each, how)) for each, tensor in enumerate(inputs)]
    if name == "all_to_all_single":
        return [torch.cat([repeat_rows(tensor, extra_rows(rank + each, how)) for each, tensor in enumerate(inputs)])]
    if name == "all_reduce_coalesced":
        return [reduce_on_one_process(how, inputs), repeat_rows(reduce_on_one_process(how, inputs), 2)]
    if name == "all_gather_coalesced":
        return [
            part
            for each, tensor in enumerate(inputs)
            for part in (tensor, repeat_rows(tensor, 1 + extra_rows(each, how)))
        ]
    assert name == "send"
    return [inputs[(rank - 1) % size]]


def dtypes(case: str, backend: str = "gloo") -> list[torch.dtype]:
    """Return the dtypes of a case."""
    name, _, how = case.partition(" ")
    kind = how.partition(" ")[0]
    if kind == "avg":
        return AVERAGED
    found = REDUCTIONS[kind][2] if kind in REDUCTIONS else MOVED
    # NCCL has no complex numbers. torch passes them as pairs of reals, but not in these operations.
    by_reals = backend != "nccl" or name not in ("reduce", "reduce_scatter", "reduce_scatter_single")
    return [dtype for dtype in found if by_reals or not dtype.is_complex]


def missing_in_backend(case: str, asynchronous: bool, backend: str) -> str:
    """Return why a backend does not have a case; "" if it has."""
    name, _, how = case.partition(" ")
    if backend == "nccl" and how.partition(" ")[0] in ("band", "bor", "bxor"):
        return "NCCL has no bitwise reductions"
    if backend == "nccl" and name == "send" and asynchronous:
        return "NCCL takes messages in both directions between two ranks as one group; ours begin one by one"
    return ""


CASES = [
    "broadcast",
    *(f"all_reduce {kind}" for kind in [*REDUCTIONS, "avg"]),
    *(f"reduce {kind}" for kind in ("sum", "max")),
    "all_gather",
    "all_gather uneven",
    "all_gather_single",
    "all_gather_single old name",
    "all_gather_single stacked",
    "gather",
    "gather uneven",
    "scatter",
    "scatter uneven",
    "reduce_scatter sum",
    "reduce_scatter min",
    "reduce_scatter sum uneven",
    "reduce_scatter_single sum",
    "reduce_scatter_single sum old name",
    "reduce_scatter_single sum stacked",
    "all_to_all",
    "all_to_all uneven",
    "all_to_all_single",
    "all_to_all_single uneven",
    "all_reduce_coalesced sum",
    "all_gather_coalesced",
    "all_gather_coalesced uneven",
    "send",
    "send batch",
    "send any",
]


def make_group(size: int) -> Any:
    """Make a group of all ranks except the first, or of both ranks of two. All ranks call it."""
    return dist.new_group(list(range(size))[-max(2, size - 1) :])


def run_on_group(mesh: Mesh, case: str, whole: bool, asynchronous: bool, shapes: list[Shape]) -> list[Any]:
    """Run a case for every dtype and shape; return nothing on a rank outside the group."""
    group = None if whole else make_group(mesh.size)
    rank = dist.get_rank(group)
    if rank < 0:
        assert collectives.all_reduce(torch.ones(1), group=group) is None
        return []
    caller = Caller(rank, dist.get_world_size(group), group, asynchronous, mesh.device)
    kinds = dtypes(case, dist.get_backend())
    return [(rank, caller.size, [run(case, caller, dtype, shape) for dtype in kinds for shape in shapes])]


def require_expected(case: str, answers: list[list[Any]], shapes: list[Shape], backend: str = "gloo") -> None:
    """Compare the results of the ranks with what one process computes."""
    assert sum(map(len, answers)) >= min(2, len(answers))
    for answer in answers:
        for rank, size, found in answer:
            kinds = dtypes(case, backend)
            wanted = [expected(case, rank, size, dtype, shape) for dtype in kinds for shape in shapes]
            for ours, plain in zip(found, wanted, strict=True):
                for left, right in zip(ours, plain, strict=True):
                    assert left.dtype == right.dtype
                    assert left.shape == right.shape
                    torch.testing.assert_close(left.cpu(), right.cpu(), rtol=1e-6 if "avg" in case else 0, atol=0)
