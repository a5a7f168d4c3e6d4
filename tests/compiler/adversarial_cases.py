"""What a trap is: a small script that a captured program could get wrong, with the outcome that is right for it.

A trap is a builder that makes model, data and job afresh, so that the plain script and the job never share anything.
A trap that is refused marks the line that the error must name with the comment `# the line`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.context.world import World
from rankless.jobs.consistent import ConsistentView
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

SEED = 11
MARK = "# the line"
LEARNING_RATE = 0.05


def nothing(_number: int) -> None:
    """For scripts that change nothing between calls."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script's job and its batches; `before_call(number)` is what the script does before each call."""

    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    batches: Sequence[tuple[Any, ...]]
    before_call: Callable[[int], None] = nothing


@dataclass(frozen=True, kw_only=True)
class AdversarialCase:
    """A script and what must become of it: the same training, or a refusal that says `refused` (a regex)."""

    build: Callable[[], Script]
    refused: str | None = None
    tolerance: float = 1e-12

    def __str__(self) -> str:
        return self.build.__name__

    def line(self) -> str:
        """Where the marked line stands, as "file.py:12"."""
        lines, first = inspect.getsourcelines(self.build)
        (place,) = (number for number, text in enumerate(lines) if MARK in text)
        return f"{inspect.getsourcefile(self.build)}:{first + place}"


@dataclass
class Call:
    """What one call left behind."""

    results: Any
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    generator: Tensor
    arguments: list[Tensor] = field(default_factory=list)


def rows(count: int = 5, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch of six features and one of four classes."""
    return torch.randn(count, 6, dtype=dtype), torch.randint(0, 4, (count,))


def batches(make: Callable[[], tuple[Any, ...]] = rows, count: int = 3) -> list[tuple[Any, ...]]:
    return [make() for _ in range(count)]


def perceptron() -> nn.Sequential:
    """A small model for batches of `rows`."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def started(case: AdversarialCase) -> tuple[Script, torch.optim.Optimizer]:
    """The script after its set-up, the same whenever it is started."""
    torch.manual_seed(SEED)
    script = case.build()
    torch.manual_seed(SEED + 1)
    parameters = [item for module in script.modules.values() for item in module.parameters()]
    return script, torch.optim.SGD(parameters, lr=LEARNING_RATE)


def tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        found |= dict(module.named_parameters(name)) | dict(module.named_buffers(name))
    return found


def call_after(script: Script, results: Any, batch: Sequence[Any]) -> Call:
    tensors = tensors_of(script.modules)
    return Call(
        results=pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), results),
        state={name: tensor.detach().clone() for name, tensor in tensors.items()},
        gradients={name: None if item.grad is None else item.grad.to_dense().clone() for name, item in tensors.items()},
        generator=torch.get_rng_state(),
        arguments=[item.clone() for item in batch if isinstance(item, Tensor)],
    )


def run_plainly(case: AdversarialCase) -> list[Call]:
    """The script as PyTorch runs it, with no Rankless."""
    script, optimizer = started(case)
    calls = []
    for number, batch in enumerate(script.batches):
        script.before_call(number)
        optimizer.zero_grad()
        # Also of parameters that the optimizer does not have: each call's gradients are its own.
        for module in script.modules.values():
            module.zero_grad()
        results = script.function(*batch)
        loss = results[0] if isinstance(results, tuple) else results
        loss.mean().backward()
        optimizer.step()
        calls.append(call_after(script, results, batch))
    return calls


def run_captured(mesh: Mesh, case: AdversarialCase) -> list[Call]:
    """The same script as a job on a mesh; on a mesh of one it is captured nevertheless."""
    script, optimizer = started(case)
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(script.function, model=script.modules, optimizer=optimizer, view="consistent", world=lambda: world)
    if mesh.size == 1:
        job._view = ConsistentView(job.definition, world)
    calls = []
    for number, batch in enumerate(script.batches):
        script.before_call(number)
        calls.append(call_after(script, job(*batch), batch))
    return calls


def assert_alike(found: Sequence[Call], wanted: Sequence[Call], tolerance: float) -> None:
    """Every call left the same behind."""
    for number, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours.generator, plain.generator), f"call {number}: the generator moved differently"
        leaves, structure = pytree.tree_flatten_with_path(vars(ours))
        plain_leaves, plain_structure = pytree.tree_flatten_with_path(vars(plain))
        assert structure == plain_structure, f"call {number}: other results"
        for (path, value), (_, plain_value) in zip(leaves, plain_leaves, strict=True):
            assert_near(value, plain_value, tolerance, f"call {number}{pytree.keystr(path)}")


def assert_near(found: Any, wanted: Any, tolerance: float, label: str) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        assert found is None or not isinstance(found, Tensor), f"{label}: a tensor, plainly {wanted}"
        assert found == wanted, label
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), label
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    off = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    assert off <= tolerance * max(largest, 1e-3), f"{label}: off by {off:.3g}, of {largest:.3g}"
