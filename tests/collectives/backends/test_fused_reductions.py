"""all_reduce_fused against a sum in one process: several tensors as if they were one, on one host and on several."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

LENGTHS = {
    "one": [700_001],
    "several pieces with long parts": [3, 300_000, 1, 262_144, 262_143, 1, 524_289],
    "many short parts": [1 + number % 40 for number in range(900)],
    "few values": [5, 0, 2],
}


def make_values(rank: int, lengths: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [((torch.arange(length) * (rank + 2) + number) % 5).to(dtype) for number, length in enumerate(lengths)]


def reduce_fused(mesh: Mesh, hosts: str, lengths: Sequence[int], dtype: torch.dtype, operation: str) -> Any:
    context = hosts_group(mesh, hosts) if len(set(hosts)) > 1 else shared_group(mesh)
    with context as group:
        inputs = make_values(mesh.rank, lengths, dtype)
        # On one rank only the results replace the inputs.
        outputs = inputs if mesh.rank == 1 else [torch.empty_like(value) for value in inputs]
        group.all_reduce_fused(
            inputs,
            outputs,
            getattr(dist.ReduceOp, operation),
            before=lambda values: values.mul_(2),
            after=lambda values: values.add_(1),
        )
        is_kept = all(map(torch.equal, inputs, make_values(mesh.rank, lengths, dtype)))
        return outputs, is_kept


@pytest.mark.ci_sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "aaa", "aab"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "operation"),
    [(torch.float32, "SUM"), (torch.float64, "AVG"), (torch.bfloat16, "MAX"), (torch.int16, "SUM")],
)
def test_several_tensors_are_reduced_as_if_they_were_one(hosts: str, lengths: str, dtype: torch.dtype, operation: str):
    size = len(hosts)
    found = on_mesh(size, reduce_fused, hosts, LENGTHS[lengths], dtype, operation)
    ranks = [make_values(rank, LENGTHS[lengths], dtype) for rank in range(size)]
    for number, given in enumerate(zip(*ranks, strict=True)):
        rows = 2 * torch.stack(given).double()
        wanted = {"SUM": rows.sum(0), "AVG": rows.mean(0), "MAX": rows.amax(0)}[operation] if len(rows[0]) else rows[0]
        for outputs, _ in found:
            torch.testing.assert_close(outputs[number].double(), wanted + 1, rtol=1e-12, atol=1e-12)
            assert torch.equal(outputs[number], found[0][0][number])
    assert [is_kept for _, is_kept in found] == [rank != 1 for rank in range(size)]


def call_differently(mesh: Mesh) -> str:
    with shared_group(mesh) as group:
        values = torch.ones(1000)
        try:
            if mesh.rank == 0:
                dist.all_reduce(values, group=group)
            else:
                group.all_reduce_fused([values], [values], dist.ReduceOp.SUM, before=torch.clone, after=torch.clone)
        except CollectiveError as error:
            return str(error.found)
        return ""


def test_a_fused_reduction_that_meets_another_collective_is_an_error():
    found = on_mesh(2, call_differently)
    assert all(found), found
    assert any("fused_all_reduce(SUM, float32, 1000 values)" in error for error in found), found
