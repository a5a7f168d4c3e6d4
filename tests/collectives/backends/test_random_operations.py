"""Random operations on shared memory groups give what one process computes, and what Gloo gives in the same workers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.operations import GLOO_DTYPES, Operation, operations, start
from collectives.backends.shared_groups import shared_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import on_mesh

from rankless.parallel.mesh import Mesh

GLOO_KINDS = {
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all_single"),
    *("reduce_scatter_single",),
}


def is_exact_in_gloo(operation: Operation) -> bool:
    """Whether Gloo takes the operation, and its result does not depend on the order in which it combines values."""
    has_values = bool(operation.shape) and all(operation.shape)
    rounds = operation.reduction == "avg" or (operation.seed % 2 and operation.torch_dtype.is_floating_point)
    moves = operation.kind not in ("all_reduce", "reduce", "reduce_scatter_single")
    takes = operation.kind in GLOO_KINDS and operation.dtype in GLOO_DTYPES and has_values
    return takes and (moves or not rounds) and not (operation.is_uneven and operation.kind == "all_gather")


def run_operations(mesh: Mesh, program: list[Operation], ranks: list[int]) -> int:
    """Run the program on a shared memory group of some workers, and then what Gloo takes on Gloo."""
    gloo: Any = dist.new_group(ranks)
    compared = 0
    with shared_group(mesh, ranks) as group:
        if group is not None:
            rank, size, started = ranks.index(mesh.rank), len(ranks), []
            for number, operation in enumerate(program):
                operation = replace(operation, tag=2 + number)
                started.append(start(operation, group, rank, size, operation.layout))
                if operation.waits_for_all:
                    while started:
                        started.pop(0).finish()
            for one in started:
                one.finish()
            rank = sorted(ranks).index(mesh.rank)  # Gloo's groups are sorted
            for operation in filter(is_exact_in_gloo, program):
                on_gloo = start(operation, gloo, rank, size, "plain")
                if operation.kind == "reduce" and rank != operation.root % size:
                    [work.wait() for work in on_gloo.works if work is not None]
                else:
                    on_gloo.finish()
                compared += 1
    if gloo is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(gloo)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(program=st.lists(operations(), min_size=5, max_size=15), data=st.data())
@pytest.mark.ci_sample(1)
def test_random_operations_give_what_one_process_and_gloo_compute(
    size: int, program: list[Operation], data: st.DataObject
):
    ranks = data.draw(st.permutations(range(size)).flatmap(lambda one: st.integers(2, size).map(lambda n: one[:n])))
    on_mesh(size, run_operations, program, list(ranks))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(operations(), min_size=20, max_size=20))
def test_ten_thousand_random_operations_give_what_one_process_computes(size: int, program: list[Operation]):
    on_mesh(size, run_operations, program, list(range(size)))


def run_all_reduce_everywhere(mesh: Mesh, dtype: torch.dtype, count: int) -> bytes:
    with shared_group(mesh) as group:
        generator = torch.Generator().manual_seed(mesh.rank)
        values = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        dist.all_reduce(values, group=group)
        return values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [5, 70_001, 1_000_003])
def test_all_ranks_get_the_same_bits_of_a_sum(dtype: torch.dtype, count: int):
    found = on_mesh(3, run_all_reduce_everywhere, dtype, count)
    assert found[0] == found[1] == found[2]
