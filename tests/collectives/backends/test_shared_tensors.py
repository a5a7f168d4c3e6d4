"""Tensors that a group allocates in its memory are reduced where they are."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh

from rankless.errors import CollectiveError
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


@pytest.mark.ci_sample(7)
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


def scatter_shared(mesh: Mesh, dtype: torch.dtype, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Reduce and scatter a shared tensor, all of it and its first values, and change it at once afterwards."""
    found = []
    with shared_group(mesh) as group:
        shared = group.allocate(count * mesh.size, dtype)
        for step, part in enumerate((count, max(1, count // 3), count)):
            values = shared[: part * mesh.size]
            values.copy_(torch.arange(len(values)) % 7 + mesh.rank + step)
            before = values.clone()
            # The last call puts the result into the tensor itself.
            output = values[mesh.rank * part :][:part] if step == 2 else torch.empty(part, dtype=dtype)
            dist.reduce_scatter_single(output, values, group=group)
            result = output.clone()
            if step < 2:
                assert torch.equal(values, before)
            shared.fill_(100)
            expected = mesh.size * (torch.arange(len(before)) % 7 + step) + mesh.size * (mesh.size - 1) // 2
            found.append((result, expected[mesh.rank * part :][:part].to(dtype)))
    return found


@pytest.mark.ci_sample(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_reduce_scatter_of_shared_tensors_sums_them(size: int, dtype: torch.dtype):
    for count in (1, 1000, 100_003):
        for answer in on_mesh(size, scatter_shared, dtype, count):
            for found, expected in answer:
                assert torch.equal(found, expected)


def scatter_with_others(mesh: Mesh) -> list[float]:
    """Some ranks pass their shared tensors, others private ones, and one that of another allocation."""
    found = []
    with shared_group(mesh) as group:
        for count in (3, 300_000):
            shared, other = (group.allocate(count, torch.float32) for _ in range(2))
            for ranks in ([0], [1, 2], [0, 1, 2], []):
                values = shared if mesh.rank in ranks else (other if mesh.rank == 2 else torch.empty(count))
                values.fill_(float(mesh.rank + 1))
                output = torch.empty(count // mesh.size)
                dist.reduce_scatter_single(output, values, group=group)
                found.append(float(output.min() + output.max()))
    return found


def test_ranks_may_mix_shared_tensors_and_others_in_one_reduce_scatter():
    assert on_mesh(3, scatter_with_others) == [[12.0] * 8] * 3


def scatter_otherwise(mesh: Mesh) -> str:
    """One rank reduces a shared tensor, another scatters it."""
    with shared_group(mesh) as group:
        shared = group.allocate(200_000, torch.float32)
        scatter = partial(dist.reduce_scatter_single, torch.empty(100_000), shared)
        call = partial(dist.all_reduce, shared) if mesh.rank else scatter
        with pytest.raises(CollectiveError) as raised:
            call(group=group)
        return str(raised.value)


def test_other_calls_on_shared_tensors_are_noticed():
    for error in on_mesh(2, scatter_otherwise):
        assert "reduce_scatter" in error
