"""Collectives of programs on uneven pieces of any dim, on the default backend and on Gloo."""

import pytest
import torch
from support.processes import on_mesh

from rankless.collectives.mesh_collectives import reduce_scatter


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
