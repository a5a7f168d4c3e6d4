"""The groups take the tensors that Gloo takes, with the same results, and refuse others with the same kind of error.

Every collective, dtype, layout and reduction is tried on Gloo and on ours. Where Gloo refuses, ours may give a result.
Left out: tensors whose values share memory, quantized ones, and scalars that ranks divide, with which Gloo writes where
it must not, moves nothing, or crashes.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh
from torch import Tensor

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]
REDUCTIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
ROWS, COLUMNS = 4, 6


def make_values(dtype: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 3, shape, generator=generator)
    if dtype.startswith("complex"):
        values = torch.complex(values.double(), torch.randint(0, 3, shape, generator=generator).double())
    return values.to(getattr(torch, dtype))


LAYOUTS: dict[str, Callable[[str, int, int], Tensor]] = {
    "plain": lambda dtype, seed, rows: make_values(dtype, seed, (rows, COLUMNS)),
    "transposed": lambda dtype, seed, rows: make_values(dtype, seed, (COLUMNS, rows)).t(),
    "strided": lambda dtype, seed, rows: make_values(dtype, seed, (rows, 2 * COLUMNS))[:, ::2],
    "channels last": lambda dtype, seed, rows: make_values(dtype, seed, (rows, 3, 4, 5)).to(
        memory_format=torch.channels_last
    ),
    "offset": lambda dtype, seed, rows: make_values(dtype, seed, (rows + 2, COLUMNS))[1:-1],
    "empty": lambda dtype, seed, _: make_values(dtype, seed, (0, COLUMNS)),
    "scalar": lambda dtype, seed, _: make_values(dtype, seed, ()),
    "conjugated": lambda dtype, seed, rows: make_values(dtype, seed, (rows, COLUMNS)).conj(),
    "negated": lambda dtype, seed, rows: torch._neg_view(make_values(dtype, seed, (rows, COLUMNS))),
    "sparse": lambda dtype, seed, rows: make_values(dtype, seed, (rows, COLUMNS)).to_sparse(),
    "sparse, no values": lambda dtype, seed, rows: torch.zeros_like(
        make_values(dtype, seed, (rows, COLUMNS))
    ).to_sparse(),
    "sparse, not coalesced": lambda dtype, seed, rows: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, seed % rows], [1, 1, 2]]), make_values(dtype, seed, (3,)), (rows, COLUMNS)
    ),
    "sparse rows": lambda dtype, seed, rows: torch.sparse_coo_tensor(
        torch.tensor([[0, 1 + seed % (rows - 1)]]), make_values(dtype, seed, (2, COLUMNS)), (rows, COLUMNS)
    ),
    "CSR": lambda dtype, seed, rows: make_values(dtype, seed, (rows, COLUMNS)).to_sparse_csr(),
    "BSC": lambda dtype, seed, rows: make_values(dtype, seed, (rows, COLUMNS)).to_sparse_bsc((2, 2)),
}
SPARSE = {name for name in LAYOUTS if name.startswith("sparse")}
NOT_RIGHT_ON_GLOO = {"transposed", "strided", "channels last", "conjugated", "negated"}
"""Gloo takes these tensors' memory as it is, or a copy that it does not write back, and so mixes up their values. Ours
must have the results that Gloo has with plain tensors of the same values."""
DIVIDE_ROWS = ("reduce_scatter_tensor", "all_to_all_single")

Make = Callable[[int, int], Tensor]


def _many(make: Make, count: int, first: int = 0) -> list[Tensor]:
    return [make(first + part, ROWS) for part in range(count)]


def _all_reduce(make: Make, group: Any, op: Any) -> list[Tensor]:
    tensor = make(0, ROWS)
    dist.all_reduce(tensor, op, group=group)
    return [tensor]


def _all_reduce_coalesced(make: Make, group: Any, op: Any) -> list[Tensor]:
    tensors = _many(make, 2)
    dist.all_reduce_coalesced(tensors, op, group=group)
    return tensors


def _reduce(make: Make, group: Any, op: Any) -> list[Tensor]:
    tensor = make(0, ROWS)
    dist.reduce(tensor, group_dst=0, op=op, group=group)
    return [tensor] if group.rank() == 0 else []


def _broadcast(make: Make, group: Any, _: Any) -> list[Tensor]:
    tensor = make(0, ROWS)
    dist.broadcast(tensor, group_src=1, group=group)
    return [tensor]


def _all_gather(make: Make, group: Any, _: Any) -> list[Tensor]:
    outputs = _many(make, group.size(), 7)
    dist.all_gather(outputs, make(0, ROWS), group=group)
    return outputs


def _all_gather_into_tensor(make: Make, group: Any, _: Any) -> list[Tensor]:
    output = make(7, ROWS * group.size())
    dist.all_gather_into_tensor(output, make(0, ROWS), group=group)
    return [output]


def _gather(make: Make, group: Any, _: Any) -> list[Tensor]:
    outputs = _many(make, group.size(), 7) if group.rank() == 0 else []
    dist.gather(make(0, ROWS), outputs or None, group_dst=0, group=group)
    return outputs


def _scatter(make: Make, group: Any, _: Any) -> list[Tensor]:
    output = make(9, ROWS)
    dist.scatter(output, _many(make, group.size()) if group.rank() == 0 else None, group_src=0, group=group)
    return [output]


def _reduce_scatter(make: Make, group: Any, op: Any) -> list[Tensor]:
    output = make(9, ROWS)
    dist.reduce_scatter(output, _many(make, group.size()), op, group=group)
    return [output]


def _reduce_scatter_tensor(make: Make, group: Any, op: Any) -> list[Tensor]:
    output = make(9, ROWS)
    dist.reduce_scatter_tensor(output, make(0, ROWS * group.size()), op, group=group)
    return [output]


def _all_to_all(make: Make, group: Any, _: Any) -> list[Tensor]:
    outputs = _many(make, group.size(), 9)
    dist.all_to_all(outputs, _many(make, group.size()), group=group)
    return outputs


def _all_to_all_single(make: Make, group: Any, _: Any) -> list[Tensor]:
    output = make(9, ROWS * group.size())
    dist.all_to_all_single(output, make(0, ROWS * group.size()), group=group)
    return [output]


CALLS: dict[str, Callable[[Make, Any, Any], list[Tensor]]] = {
    **{"all_reduce": _all_reduce, "all_reduce_coalesced": _all_reduce_coalesced, "reduce": _reduce},
    **{"reduce_scatter": _reduce_scatter, "reduce_scatter_tensor": _reduce_scatter_tensor, "broadcast": _broadcast},
    **{"all_gather": _all_gather, "all_gather_into_tensor": _all_gather_into_tensor, "gather": _gather},
    **{"scatter": _scatter, "all_to_all": _all_to_all, "all_to_all_single": _all_to_all_single},
}


def list_cases(call: str) -> Iterator[tuple[str, str, str]]:
    for dtype in DTYPES:
        for layout in sorted(LAYOUTS.keys() - ({"scalar"} if call in DIVIDE_ROWS else set())):
            for reduction in REDUCTIONS if "reduce" in call else ["SUM"]:
                if reduction in ("SUM", "MAX") or layout in ("plain", "sparse"):
                    yield dtype, layout, reduction


def describe(tensor: Tensor) -> list[Any]:
    """Return a tensor's layout, dtype, shape and values."""
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    values = dense.flatten().view(torch.uint8)
    if dense.dtype is torch.bool:
        values = values.clamp(max=1)  # Gloo's sum of two True is 2
    return [str(tensor.layout), dense.dtype, tuple(dense.shape), values.tolist()]


def attempt(call: str, case: tuple[str, str, str], group: Any, rank: int, *, plain: bool) -> list[Any] | Exception:
    """Return what the outputs are after a call, or its error. `plain` tensors have the values alone of the layout."""
    dtype, layout, reduction = case

    def make(part: int, rows: int) -> Tensor:
        tensor = LAYOUTS[layout](dtype, 31 * rank + part, rows)
        if plain:
            return tensor.resolve_conj().resolve_neg().contiguous(memory_format=torch.contiguous_format)
        return tensor

    try:
        outputs = CALLS[call](make, group, getattr(dist.ReduceOp, reduction))
        return [describe(output) for output in outputs]
    except Exception as error:
        return error


def are_near(found: list[Any], expected: list[Any]) -> bool:
    """Whether outputs are equal up to rounding: a complex number divided by 3 is not rounded as its parts are."""
    for (*kind, values), (*other_kind, others) in zip(found, expected, strict=True):
        one, other = (torch.tensor(each, dtype=torch.uint8).view(kind[1]) for each in (values, others))
        if kind != other_kind or not torch.allclose(one, other):
            return False
    return True


def compare(mesh: Mesh, call: str, hosts: str | None) -> list[str]:
    """Return the cases in which our group does not do as Gloo does."""
    wrong = []
    warnings.simplefilter("ignore")
    with shared_group(mesh) if hosts is None else hosts_group(mesh, hosts) as group:
        for case in list_cases(call):
            has_values = case[1] in NOT_RIGHT_ON_GLOO
            expected = attempt(call, case, mesh.group, mesh.rank, plain=has_values)
            found = attempt(call, case, group, mesh.rank, plain=False)
            is_error = isinstance(found, Exception)
            if is_error and has_values:  # torch itself refuses some, before a group sees them
                expected = attempt(call, case, mesh.group, mesh.rank, plain=False)
            if isinstance(expected, Exception):
                is_refused = isinstance(found, RuntimeError | type(expected)) and not isinstance(found, CollectiveError)
                is_same = not is_error or is_refused
            else:
                dtype, layout, reduction = case
                is_lost = layout in SPARSE and dtype.startswith("complex")
                is_rounded = reduction == "AVG" and dtype.startswith("complex")
                is_same = not is_error and (found == expected or is_lost or (is_rounded and are_near(found, expected)))
            if not is_same:
                wrong.append(f"{call} {case}: {found!r:.300} instead of {expected!r:.300}")
    return wrong


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=[] if c in ("all_reduce", "reduce") else pytest.mark.exhaustive) for c in CALLS]
)
def test_the_group_of_one_host_does_as_gloo(call: str):
    assert on_mesh(2, compare, call, None) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", CALLS)
def test_the_group_of_several_hosts_does_as_gloo(call: str):
    assert on_mesh(3, compare, call, "aab") == [[], [], []]


def sum_sparse(mesh: Mesh, hosts: str | None) -> list[Any]:
    """Sum sparse tensors of complex values, of float16, and the gradients of an embedding under DDP."""
    with shared_group(mesh) if hosts is None else hosts_group(mesh, hosts) as group:
        found = []
        for dtype in (torch.complex64, torch.float16, torch.bool):
            values = (torch.eye(3) * (mesh.rank + 1)).to(dtype).to_sparse()
            dist.all_reduce(values, group=group)
            found.append(values.to_dense().real.diagonal().tolist())
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 2, sparse=True).double()
        trained = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        for step in range(3):
            model.zero_grad()
            trained(torch.tensor([[mesh.rank, step, 9]])).sum().backward()
        assert model.weight.grad is not None
        return [*found, model.weight.grad.is_sparse, model.weight.grad.to_dense()[:, 0].tolist()]


@pytest.mark.parametrize("hosts", [None, pytest.param("aab", marks=pytest.mark.exhaustive)])
def test_sparse_tensors_are_summed_and_ddp_trains_sparse_embeddings(hosts: str | None):
    size = 2 if hosts is None else 3
    total = float(sum(range(1, size + 1)))
    rows = [0.0] * 10
    for rank in range(size):
        for row in (rank, 2, 9):
            rows[row] += 1 / size / 3
    for answer in on_mesh(size, sum_sparse, hosts):
        assert answer[:4] == [[total] * 3, [total] * 3, [True] * 3, True]
        assert answer[4] == pytest.approx(rows, abs=1e-15)
