"""Tensors that a group allocates in its memory are reduced where they are."""

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh

from rankless.parallel.mesh import Mesh

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def reduce_shared(mesh: Mesh, dtype: torch.dtype, counts: list[int]) -> list[torch.Tensor]:
    """Reduce each tensor twice, with other values, and change it at once afterwards."""
    found = []
    with shared_group(mesh) as group:
        tensors = [group.allocate(count, dtype) for count in counts]
        for tensor in tensors:
            assert not tensor.any()
        for step in range(2):
            for tensor in tensors:
                tensor.copy_(torch.arange(len(tensor)) % 7 + mesh.rank + step)
                dist.all_reduce(tensor, group=group)
                found.append(tensor.clone())
                tensor.fill_(100)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_all_reduce_of_shared_tensors_sums_them(size: int, dtype: torch.dtype):
    counts = [1, 5, 1000, 300_007]
    for answer in on_mesh(size, reduce_shared, dtype, counts):
        for step in range(2):
            for count, found in zip(counts, answer[step * len(counts) :], strict=False):
                expected = size * (torch.arange(count) % 7 + step) + size * (size - 1) // 2
                assert torch.equal(found, expected.to(dtype))


def reduce_with_others(mesh: Mesh) -> list[float]:
    """One rank passes its shared tensor, another a private one, in one call."""
    with shared_group(mesh) as group:
        found = []
        for count in (10, 1_000_000):
            shared = group.allocate(count, torch.float32)
            for ranks in ([0], [1, 2], [0, 1, 2], []):
                values = shared if mesh.rank in ranks else torch.empty(count)
                values.fill_(float(mesh.rank + 1))
                dist.all_reduce(values, group=group)
                found.append(float(values.min() + values.max()))
                part = shared[: count // 2]
                part.fill_(1.0)
                dist.all_reduce(part, group=group)
                found.append(float(part.min() + part.max()))
        return found


def test_ranks_may_mix_shared_tensors_and_others_in_one_call():
    assert on_mesh(3, reduce_with_others) == [[12.0, 6.0] * 8] * 3


def allocate_nothing(mesh: Mesh) -> list[int]:
    with shared_group(mesh) as group:
        empty = group.allocate(0, torch.float32)
        dist.all_reduce(empty, group=group)
        dist.all_reduce(torch.empty(0), group=group)
        return list(empty.shape)


def test_an_empty_tensor_can_be_allocated_and_reduced():
    assert on_mesh(2, allocate_nothing) == [[0], [0]]
