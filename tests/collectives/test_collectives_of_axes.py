"""Collectives of programs on uneven pieces of any dim, on the default backend and on Gloo."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS, shared_group
from support.processes import on_mesh

from rankless.collectives.mesh_collectives import reduce_scatter, start_ring_shift
from rankless.parallel.mesh import Mesh, MeshAxis


def scatter_sums(mesh, case):
    """Return this rank's rows of the sum of all ranks' tensors, and those of a sum computed here."""
    shape, dim, lengths, dtype, order = case
    everyone = []
    for rank in range(mesh.size):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 10
        everyone.append((torch.complex(values, values.flip(0)) if dtype.is_complex else values).to(dtype))
    wanted = sum(everyone).split(list(lengths), dim)[mesh.rank]
    own = everyone[mesh.rank].permute(order).contiguous().permute([order.index(place) for place in range(len(order))])
    before = own.clone()
    found = reduce_scatter(own, among=mesh, dim=dim, lengths=lengths)
    assert torch.equal(own, before)
    assert found.is_contiguous()
    return found, wanted


CASES = [
    ((4, 3), 0, (2, 2), torch.float64, (0, 1)),
    ((5, 3), 0, (3, 2), torch.float64, (1, 0)),
    ((2, 5, 3), 1, (1, 4), torch.float64, (2, 0, 1)),
    ((2, 3, 7), 2, (7, 0), torch.float64, (0, 1, 2)),
    ((3, 0), 0, (2, 1), torch.float64, (0, 1)),
    ((6,), 0, (3, 3), torch.complex128, (0,)),
    ((3, 5), 1, (3, 2), torch.int64, (1, 0)),
]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_gets_its_rows_of_a_sum(case):
    for found, wanted in on_mesh(2, scatter_sums, case):
        assert found.shape == wanted.shape
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_three_ranks_get_uneven_rows_of_a_sum():
    for found, wanted in on_mesh(3, scatter_sums, ((4, 7), 1, (3, 3, 1), torch.float64, (1, 0))):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


LENGTHS = {2: (3, 2), 3: (4, 0, 1), 4: (1, 2, 0, 5)}


def make_piece(rank, length, dtype):
    values = torch.arange(length * 6).view(2, 3, length) + 100 * rank
    return values.to(dtype).transpose(1, 2)  # the positions are dim 1, and do not lie together


def shift_round(mesh, dtype):
    """Return what this rank has after each hop around the ring; two tensors are on their way at once."""
    lengths = LENGTHS[mesh.size]
    value, found = make_piece(mesh.rank, lengths[mesh.rank], dtype), []
    second = value + 1
    for _ in range(mesh.size):
        pending = [start_ring_shift(item, among=mesh, dim=1, lengths=lengths) for item in (value, second)]
        del value, second  # the shifts keep what they send
        value, second = (item.wait() for item in pending)
        lengths = lengths[-1:] + lengths[:-1]
        assert value.is_contiguous()
        torch.testing.assert_close(second, value + 1, rtol=0, atol=0)
        found.append(value.clone())
    return found


def shift_in_shared_memory(mesh, dtype):
    with shared_group(mesh) as group:
        return shift_round(replace(mesh, group=group), dtype)


def shift_between_hosts(mesh, dtype):
    with hosts_group(mesh, "aabb"[: mesh.size] if mesh.size > 2 else "ab") as group:
        return shift_round(replace(mesh, group=group), dtype)


def shift_along_axis(mesh, dtype):
    """Shift within two groups of two ranks each: 0 and 2, 1 and 3."""
    groups = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    axis = MeshAxis(name="sequence", role="sequence", rank=mesh.rank // 2, size=2, group=groups[mesh.rank % 2])
    found = shift_round(axis, dtype)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize(
    "shift", [shift_round, pytest.param(shift_in_shared_memory, marks=NEEDS_SHARED_GROUPS), shift_between_hosts]
)
@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.ci_sample(12)
def test_a_tensor_travels_around_a_ring_and_comes_home(shift, size, dtype):
    for rank, found in enumerate(on_mesh(size, shift, dtype)):
        for hop, value in enumerate(found, start=1):
            source = (rank - hop) % size
            torch.testing.assert_close(value, make_piece(source, LENGTHS[size][source], dtype), rtol=0, atol=0)


def test_a_ring_along_an_axis_has_only_the_workers_of_the_axis():
    for rank, found in enumerate(on_mesh(4, shift_along_axis, torch.float64)):
        wanted = [make_piece(source, LENGTHS[2][source], torch.float64) for source in (1 - rank // 2, rank // 2)]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_one_process_passes_a_tensor_to_itself():
    value = torch.randn(3, 2)
    assert start_ring_shift(value, among=Mesh.solo(), dim=0, lengths=(3,)).wait() is value
