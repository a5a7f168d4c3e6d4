"""Find the jobs of optimizers, whose states `rankless.load` lets them divide before it reads any."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from rankless.context.redundant_step_calls import StepHook
from rankless.jobs.job import Job


def find_jobs(objects: Iterable[Any]) -> Iterator[Job[Any, Any]]:
    """Yield the jobs of all optimizers among some objects.

    Example:
        >>> import torch
        >>> import rankless
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> train = rankless.job(model=model, optimizer=optimizer)(lambda inputs: model(inputs).mean())
        >>> list(find_jobs([model, optimizer])) == [train]
        True
    """
    for item in objects:
        for hook in item._optimizer_step_pre_hooks.values() if isinstance(item, Optimizer) else ():
            if isinstance(hook, StepHook) and isinstance(hook.job, Job):
                yield hook.job


def divide_states_of_jobs(objects: Iterable[Any]) -> None:
    """Divide the states of the jobs of all optimizers among some objects, before these load a state. Collective."""
    for job in find_jobs(objects):
        job.divide_states()
