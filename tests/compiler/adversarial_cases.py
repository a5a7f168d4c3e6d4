"""Adversarial cases: small scripts that a captured program could get wrong, each with its correct outcome.

A case builds model, data and job anew each time, so that the plain script and the job share nothing. A refused case
marks the line that the error must name with the comment `# the line`.
"""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from support.devices import get_random_state
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

SEED = 11
MARK = "# the line"
LEARNING_RATE = 0.05


def do_nothing(_number: int) -> None:
    """Do nothing: the default for scripts that change nothing between calls."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script's job and its batches; the script calls `before_call(number)` before each call."""

    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    batches: Sequence[tuple[Any, ...]]
    before_call: Callable[[int], None] = do_nothing


@dataclass(frozen=True, kw_only=True)
class AdversarialCase:
    """A script and its required outcome: the same training, or a `CaptureError` that matches the regex `refused`."""

    build: Callable[[], Script]
    refused: str | None = None
    tolerance: float = 1e-12
    reads_values: bool = False
    """Whether its Python reads values of tensors, so that it cannot be captured without running."""

    def __str__(self) -> str:
        return self.build.__name__

    def line(self) -> str:
        """Return the marked line as "file.py:12"."""
        lines, first = inspect.getsourcelines(self.build)
        (offset,) = (number for number, text in enumerate(lines) if MARK in text)
        return f"{display_name(inspect.getsourcefile(self.build))}:{first + offset}"


@dataclass
class CallState:
    """The state after one call."""

    results: Any
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    generator: Tensor
    arguments: list[Tensor] = field(default_factory=list)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The strides of the gradients, and of the results."""


def rows(count: int = 5, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return a batch of rows with six features and of labels of four classes."""
    return torch.randn(count, 6, dtype=dtype), torch.randint(0, 4, (count,))


def batches(make: Callable[[], tuple[Any, ...]] = rows, count: int = 3) -> list[tuple[Any, ...]]:
    return [make() for _ in range(count)]


def perceptron() -> nn.Sequential:
    """Return a small model for batches of `rows`."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def start_script(case: AdversarialCase) -> tuple[Script, torch.optim.Optimizer]:
    """Return the script after its setup, which is the same each time."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    script = case.build()
    torch.manual_seed(SEED + 1)
    parameters = [item for module in script.modules.values() for item in module.parameters()]
    return script, torch.optim.SGD(parameters, lr=LEARNING_RATE)


def list_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        found |= dict(module.named_parameters(name)) | dict(module.named_buffers(name))
    return found


def record_call(script: Script, results: Any, batch: Sequence[Any]) -> CallState:
    tensors = list_tensors(script.modules)
    return CallState(
        results=pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), results),
        state={name: tensor.detach().clone() for name, tensor in tensors.items()},
        gradients={name: None if item.grad is None else item.grad.to_dense().clone() for name, item in tensors.items()},
        generator=get_random_state(),
        arguments=[item.clone() for item in batch if isinstance(item, Tensor)],
        strides=list_strides(tensors, results),
    )


def list_strides(tensors: Mapping[str, Tensor], results: Any) -> dict[str, tuple[int, ...]]:
    """Return the strides of all dense gradients, and of the results."""
    found = {f"gradient of {name}": item.grad for name, item in tensors.items() if item.grad is not None}
    found |= {
        f"result {number}": leaf for number, leaf in enumerate(pytree.tree_leaves(results)) if torch.is_tensor(leaf)
    }
    return {name: item.stride() for name, item in found.items() if not item.is_sparse}


def run_plain(case: AdversarialCase) -> list[CallState]:
    """Run the script with PyTorch only, without Rankless."""
    script, optimizer = start_script(case)
    calls = []
    for number, batch in enumerate(script.batches):
        script.before_call(number)
        optimizer.zero_grad()
        results = script.function(*batch)
        loss = results[0] if isinstance(results, tuple) else results
        loss.mean().backward()
        optimizer.step()
        calls.append(record_call(script, results, batch))
    return calls


def run_captured(mesh: Mesh, case: AdversarialCase) -> list[CallState]:
    """Run the same script as a job on a mesh; a mesh of one captures it too."""
    script, optimizer = start_script(case)
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(script.function, model=script.modules, optimizer=optimizer, view="consistent", world=lambda: world)
    if mesh.size == 1:
        job._views.view = ConsistentView(job.definition, world)
    calls = []
    for number, batch in enumerate(script.batches):
        script.before_call(number)
        calls.append(record_call(script, job(*batch), batch))
    return calls


def assert_alike(found: Sequence[CallState], wanted: Sequence[CallState], tolerance: float) -> None:
    """Assert that every call leaves the same state."""
    for number, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours.generator, plain.generator), f"call {number}: the generator moved differently"
        leaves, structure = pytree.tree_flatten_with_path(vars(ours))
        plain_leaves, plain_structure = pytree.tree_flatten_with_path(vars(plain))
        assert structure == plain_structure, f"call {number}: other results"
        for (path, value), (_, plain_value) in zip(leaves, plain_leaves, strict=True):
            assert_near(value, plain_value, tolerance, f"call {number}{pytree.keystr(path)}")


def without_layout(calls: Sequence[CallState]) -> list[CallState]:
    """Return states without strides, and with dense arguments: the logical view promises values alone."""
    return [replace(call, strides={}, arguments=[each.to_dense() for each in call.arguments]) for call in calls]


def assert_near(found: Any, wanted: Any, tolerance: float, label: str) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        assert found is None or not isinstance(found, Tensor), f"{label}: a tensor, plainly {wanted}"
        assert found == wanted, label
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), label
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    off = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    assert off <= tolerance * max(largest, 1e-3), f"{label}: off by {off:.3g}, of {largest:.3g}"
