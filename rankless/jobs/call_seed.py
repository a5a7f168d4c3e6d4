"""The seed of a job's call; see Note [a key for each random operator]."""

import contextlib
from collections.abc import Iterator

import torch

from rankless.jobs.job_definition import JobDefinition


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
