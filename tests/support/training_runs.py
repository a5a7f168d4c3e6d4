"""Run trainings such as those of `support.trainings` in float64, and compare workers with one device."""

import torch

from rankless.context.world import World

BOUND = 1e-12


def run_in_float64(training, mesh, build):
    """Return what a training returns on this worker.

    Args:
        training: The function of a case.
        mesh: The workers.
        build: Makes a job from a world, a function, a model, an optimizer and step options by name.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

        def make(function, model, optimizer, **options):
            return build(world, function, model, optimizer, options)

        return [value.detach().clone() for value in training(make)]
    finally:
        torch.set_default_dtype(before)


def require_equal(found, wanted):
    """Assert that a worker returns what one device returns, to 1e-12 of the largest entry."""
    assert len(found) == len(wanted)
    for place, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), place
        if not plain.numel():
            continue
        off = float((ours - plain).abs().max()) / max(1.0, float(plain.abs().max()))
        assert off <= BOUND, f"value {place} is off by {off:.3g}"
