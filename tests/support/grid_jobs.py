"""Jobs on meshes with any axes, in the workers of `on_mesh`, and what they train."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from support.grids import make_grid
from torch import Tensor, nn

from rankless.context.world import World
from rankless.jobs.job import Job, make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh
from rankless.parallel.user_plan import Plan


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Let new tensors be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_grid_job(
    function: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    sizes: dict[str, int],
    plan: Plan | None = None,
    *,
    zero: str | None = None,
    clip_norm: float | None = None,
    **world_options: Any,
) -> tuple[Job, World]:
    """Return a job on a mesh, and its world.

    Args:
        function: The job's function.
        model: The model that it trains.
        optimizer: The optimizer.
        mesh: The mesh of this worker: that of one device, or of `on_mesh`.
        sizes: The size of each axis, from the outermost. One device has none.
        plan: The plan.
        zero: What the job divides with `zero=`. One device divides nothing.
        clip_norm: The limit of the gradient's norm.
        world_options: Other fields of the world.
    """
    grid = make_grid(mesh, **sizes) if mesh.size > 1 else mesh
    world = World(mesh=grid, notify=lambda _: None, send_record=lambda _: None, **world_options)
    options = StepOptions(zero=zero if mesh.size > 1 else None, clip_norm=clip_norm)
    job = make_job(function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=options)
    return job.configure({}, plan=plan), world


def check_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Check the values of one worker against those of one device, to the rounding of float64."""
    assert len(found) == len(wanted)
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
