"""Is a step gathered over several calls the plain script's one step on all their rows?

The plain script computes the loss once per step, on the rows of all its calls together. (Where batch norm keeps
statistics of each call, the plain script of a test says so itself: `Losses.plainly`.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from exactness import BOUNDS, as_tensor, difference
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

SEED = 31
GROUPS = ((7, 7, 7), (7, 5, 1), (5, 7))
"""Rows of the calls of each step; the last step has fewer calls or rows."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that accumulates: `loss(*batch)` of `modules`, and a function from a number of rows to a batch."""

    modules: dict[str, nn.Module]
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    rate: float = 0.1
    together: Callable[..., Any] | None = None
    """The plain script's loss of all calls' batches, where that is not `loss` of them concatenated."""


def start_script(
    build: Callable[[], Script], dtype: torch.dtype, groups: Sequence[Sequence[int]]
) -> tuple[Script, Any]:
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    script = build()
    batches = [[script.batch(rows) for rows in group] for group in groups]
    torch.manual_seed(SEED + 1)
    return script, batches


def make_optimizer(script: Script) -> torch.optim.Optimizer:
    parameters = [item for module in script.modules.values() for item in module.parameters()]
    return torch.optim.SGD(parameters, lr=script.rate, momentum=0.9)


def get_parameters(script: Script) -> dict[str, Tensor]:
    return {
        f"{name}.{path}": item.detach().clone()
        for name, module in script.modules.items()
        for path, item in module.state_dict().items()
    }


def train_accumulated(
    mesh: Mesh, build: Callable[[], Script], dtype: torch.dtype, groups: Sequence[Sequence[int]] = GROUPS
) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """Return for each step the loss of every call and the state after it."""
    try:
        script, batches = start_script(build, dtype, groups)
        world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
        job = make_job(
            script.loss,
            model=script.modules,
            optimizer=make_optimizer(script),
            view="consistent",
            world=lambda: world,
            step_options=StepOptions(accumulate=max(map(len, groups))),
        )
        steps = []
        for group in batches:
            losses = [job(*batch) for batch in group]
            assert job.stepped == (len(group) == max(map(len, groups)))
            assert job.flush() != job.stepped
            steps.append((losses, get_parameters(script)))
        return steps
    finally:
        torch.set_default_dtype(torch.float32)


def concatenate(batches: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the arguments of one call on the rows of all calls."""
    return [
        torch.cat([as_tensor(item) for item in items])
        if isinstance(as_tensor(items[0]), Tensor)
        else sum(items)
        if isinstance(items[0], int)
        else items[0]
        for items in zip(*batches, strict=True)
    ]


def train_plainly(
    build: Callable[[], Script], dtype: torch.dtype, groups: Sequence[Sequence[int]] = GROUPS
) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """Return for each step the plain loss of every call, and the state after one step on all rows."""
    try:
        script, batches = start_script(build, dtype, groups)
        optimizer = make_optimizer(script)
        steps = []
        for group in batches:
            losses = []
            if script.together is None:
                losses = [script.loss(*batch).detach() for batch in group]
            optimizer.zero_grad()
            together = script.loss(*concatenate(group)) if script.together is None else script.together(group)
            together.mean().backward()
            optimizer.step()
            steps.append((losses, get_parameters(script)))
        return steps
    finally:
        torch.set_default_dtype(torch.float32)


def assert_accumulated(
    build: Callable[[], Script], workers: int, dtype: torch.dtype, groups: Sequence[Sequence[int]] = GROUPS
) -> None:
    """Assert that all losses and states equal the plain script's on every rank."""
    wanted = train_plainly(build, dtype, groups)
    ranks = (
        [train_accumulated(Mesh.solo(), build, dtype, groups)]
        if workers == 1
        else on_mesh(workers, train_accumulated, build, dtype, groups)
    )
    for other in ranks[1:]:
        for (losses, state), (theirs, their_state) in zip(ranks[0], other, strict=True):
            assert all(difference(*pair) == 0 for pair in zip(losses, theirs, strict=True))
            assert all(torch.equal(tensor, their_state[name]) for name, tensor in state.items())
    for number, ((losses, state), (plain_losses, plain)) in enumerate(zip(ranks[0], wanted, strict=True)):
        for ours, theirs in zip(losses, plain_losses, strict=False):
            assert difference(ours, theirs) <= BOUNDS[dtype], f"step {number}: loss {ours}, plainly {theirs}"
        for name, tensor in plain.items():
            off = difference(state[name], tensor)
            assert off <= BOUNDS[dtype], f"step {number}: {name} off by {off:.3g}"
