"""After a call on a mesh, a weight that a hook computes has the value that one device leaves."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh


def weights_after_two_calls(change, *, captured: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = change(nn.Linear(4, 3).double())
    batches = torch.randn(2, 5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    world = World(
        mesh=Mesh(rank=0, size=1, device=torch.device("cpu")), notify=lambda _: None, send_record=lambda _: None
    )
    job = make_job(
        lambda batch: layer(batch).square().mean(), model=layer, optimizer=optimizer, view=None, world=lambda: world
    )
    if captured:
        job._views.view = ConsistentView(job.definition, world)
    weights = []
    for batch in batches:
        job(batch)
        weights.append(layer.weight.detach().clone())
    return weights


@pytest.mark.parametrize(
    "change",
    [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_a_recomputed_weight_is_left_as_on_one_device(change):
    for ours, plain in zip(
        weights_after_two_calls(change, captured=True), weights_after_two_calls(change, captured=False), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
