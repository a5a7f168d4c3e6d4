"""Random operations on hierarchical groups give what one process computes, and what Gloo gives in the same workers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.operations import Operation, operations, start
from collectives.backends.test_random_operations import is_exact_in_gloo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import on_mesh

from rankless.parallel.mesh import Mesh

LAYOUTS = ["aab", "abb", "aabb", "abab", "aaab", "abbb", "aabc", "abca"]
REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")


def is_exact(operation: Operation) -> bool:
    """Whether the order in which values are combined does not change the result."""
    rounds = operation.reduction == "avg" or (operation.seed % 2 and operation.torch_dtype.is_floating_point)
    return operation.kind not in REDUCING or not rounds


def run_operations(mesh: Mesh, program: list[Operation], hosts: str) -> int:
    """Run the program on a hierarchical group, and then what Gloo takes on the workers' own group."""
    compared = 0
    with hosts_group(mesh, hosts) as group:
        started = []
        for number, operation in enumerate(program):
            # Whole numbers give the same sums in every order.
            exact = operation if is_exact(operation) else replace(operation, reduction="sum", seed=2 * operation.seed)
            started.append(start(replace(exact, tag=2 + number), group, mesh.rank, mesh.size, operation.layout))
            if operation.waits_for_all:
                while started:
                    started.pop(0).finish()
        for one in started:
            one.finish()
        for operation in filter(is_exact_in_gloo, program):
            on_gloo = start(operation, mesh.group, mesh.rank, mesh.size, "plain")
            if operation.kind == "reduce" and mesh.rank != operation.root % mesh.size:
                [work.wait() for work in on_gloo.works if work is not None]
            else:
                on_gloo.finish()
            compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", "abab", "aabc"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(operations(), min_size=5, max_size=12))
@pytest.mark.ci_sample(1)
def test_random_operations_across_hosts_give_what_one_process_and_gloo_compute(hosts: str, program: list[Operation]):
    on_mesh(len(hosts), run_operations, program, hosts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hosts", LAYOUTS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(operations(), min_size=20, max_size=20))
def test_ten_thousand_random_operations_across_hosts_give_what_one_process_computes(
    hosts: str, program: list[Operation]
):
    on_mesh(len(hosts), run_operations, program, hosts)


def reduce_random_values(mesh: Mesh, hosts: str, dtype: torch.dtype, count: int) -> list[bytes]:
    found = []
    with hosts_group(mesh, hosts) as group:
        generator = torch.Generator().manual_seed(mesh.rank)
        values = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            reduced = values.clone()
            dist.all_reduce(reduced, reduction, group=group)
            found.append(reduced.view(torch.uint8).numpy().tobytes())
        if dtype is torch.float64:
            on_gloo = values.clone()
            dist.all_reduce(on_gloo, group=mesh.group)
            dist.all_reduce(values, group=group)
            assert torch.allclose(on_gloo, values, rtol=1e-12, atol=1e-12)
    return found


@pytest.mark.ci_sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [5, 700_001])
@pytest.mark.parametrize("hosts", ["aab", "abca"])
def test_all_ranks_of_all_hosts_get_the_same_bits_of_a_sum(hosts: str, count: int, dtype: torch.dtype):
    first, *others = on_mesh(len(hosts), reduce_random_values, hosts, dtype, count)
    assert all(other == first for other in others)
    again = on_mesh(len(hosts), reduce_random_values, hosts, dtype, count)
    assert again[0] == first


def call_without_values(mesh: Mesh, hosts: str) -> list[Any]:
    with hosts_group(mesh, hosts) as group:
        empty, size = torch.zeros(0), mesh.size
        dist.all_reduce(empty, group=group)
        dist.broadcast(empty, group_src=size - 1, group=group)
        dist.all_gather([torch.zeros(0) for _ in range(size)], empty, group=group)
        dist.all_to_all_single(empty, empty, group=group)
        dist.reduce_scatter_single(empty, empty, group=group)
        sizes = [0 if rank % 2 else 3 for rank in range(size)]
        gathered = [torch.zeros(count) for count in sizes]
        dist.all_gather(gathered, torch.full((sizes[mesh.rank],), float(mesh.rank)), group=group)
        return [tensor.tolist() for tensor in gathered]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", "abca"])
def test_empty_tensors_are_no_exception(hosts: str):
    expected = [[] if rank % 2 else [float(rank)] * 3 for rank in range(len(hosts))]
    assert on_mesh(len(hosts), call_without_values, hosts) == [expected] * len(hosts)
