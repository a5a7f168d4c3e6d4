"""The settings in which a job's function runs: dtype, autocast, and seed; see Note [a key for each random operator]."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from rankless.compiler.capture.global_modes import apply_autocast_state, get_autocast_state
from rankless.context.world import World
from rankless.jobs.dtype_override import use_default_dtype
from rankless.jobs.job_definition import CallResult, JobDefinition


def make_evaluation(
    job: JobDefinition, world: World, dtype: torch.dtype | None, run: Callable[[], CallResult]
) -> Callable[[], CallResult]:
    """Return a function that runs a job's function each time as the script's call does.

    Args:
        job: The job.
        world: Its world.
        dtype: The default dtype in which the job was defined.
        run: Runs the function.
    """
    device = job.device(world.mesh.device)
    autocast = get_autocast_state(device.type)

    def evaluate() -> CallResult:
        with (
            apply_autocast_state(autocast),
            use_default_dtype(world.settings.dtype or dtype),
            world.script.leftovers.inside_job(),
            seed_call(job, device),
        ):
            return run()

    return evaluate


@contextlib.contextmanager
def seed_call(job: JobDefinition, device: torch.device) -> Iterator[None]:
    """Within the context, PyTorch's generator has a seed that it drew itself. It advances by this one draw only.

    For a job that draws from the generator, do nothing.
    """
    if not job.draws_by_counter:
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator).item())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
