"""Checks that a training on real workers equals the plain one-device script, step by step.

Note [two comparisons]: (a) Before every call the worker's parameters, buffers and generator are recorded. The plain
script starts from exactly these, and its results, gradients, buffers and generator after the call must equal the
worker's. So 20 steps are 20 independent checks. (b) The plain script runs freely from the first step, and its
parameters after the last step must equal the workers'. This finds faults that (a) cannot: optimizers, schedules, lost
steps.

Note [zero up to rounding]: a gradient whose true value is zero, as of a bias before batch norm, is rounding only, in
the plain script too. A scenario lists such parameters as `vanishing`. Their gradients are measured against the largest
gradient of the model, and must be zero by that measure; all others against their own largest entry. A parameter that
began at zero and moved only by such gradients is likewise measured against the largest parameter.

Note [float32 that can decide]: a bound of 1e-5 decides only if the plain script's own float32 gradient is well inside
it. Sums that cancel (0.004 of terms of 0.25) leave fewer digits in any order of summation. Such a scenario runs only in
float64 with a bound of 1e-12, and has a better conditioned counterpart for both: docs/decisions/0005.

Note [adaptive optimizers]: they make whole steps of such rounding. Their parameters may differ by 10 times the
difference between the plain script and itself with permuted rows, and so another order of its sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.devices import get_random_state, set_random_state
from support.processes import on_mesh
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
DRIFTS = 10
SEED = 20
PERMUTATIONS = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """One job of a script; with an optimizer it trains."""

    function: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a user's script creates before its loop; each batch passes through all `steps`."""

    modules: Mapping[str, nn.Module]
    steps: Sequence[Step]
    after_batch: Callable[[], Any] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A script and its batches. `build` and `batch` stand at the top level of a file, for workers find them by name.

    `batch(rows)` gives the arguments of one call (a dict: keyword arguments). Under SGD parameters are `exact`;
    otherwise the drift of permuted sums is measured, so the model must draw no random numbers. A model that computes
    in float32 whatever the default is has no `dtypes` but that.
    """

    build: Callable[[], Script]
    batch: Callable[[int], Any]
    rows: Sequence[int] = (7,) * 9 + (5,) + (7,) * 8 + (5, 1)
    exact: bool = True
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)
    vanishing: Sequence[str] = ()
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.build.__name__


@dataclass
class Call:
    """The inputs and results of one call of a job, on one rank."""

    state: dict[str, Tensor]
    generator: Tensor
    results: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state_after: dict[str, Tensor] = field(default_factory=dict)
    generator_after: Tensor | None = None


def start_scenario(scenario: Scenario, dtype: torch.dtype) -> tuple[Script, list[Any]]:
    """Return the script after its set-up and all batches; the same in every process."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    script = scenario.build()
    batches = [scenario.batch(rows) for rows in scenario.rows]
    torch.manual_seed(SEED + 1)
    return script, batches


def get_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        found |= dict(module.named_parameters(name)) | dict(module.named_buffers(name))
    return found


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def get_gradients(modules: Mapping[str, nn.Module]) -> dict[str, Tensor | None]:
    return {
        name: None if tensor.grad is None else tensor.grad.clone()
        for name, tensor in get_tensors(modules).items()
        if isinstance(tensor, nn.Parameter)
    }


def call_with_batch(function: Callable[..., Any], batch: Any) -> Any:
    return function(**batch) if isinstance(batch, dict) else function(*batch)


def train_on_mesh(mesh: Mesh, scenario: Scenario, dtype: torch.dtype) -> list[Call]:
    """Return every call as one worker sees it."""
    try:
        script, batches = start_scenario(scenario, dtype)
        world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
        jobs = [
            make_job(
                step.function,
                model=script.modules,
                optimizer=step.optimizer,
                view="consistent",
                world=lambda: world,
            )
            for step in script.steps
        ]
        calls = []
        for batch in batches:
            for job in jobs:
                call = Call(copy_tensors(get_tensors(script.modules)), get_random_state())
                call.results = call_with_batch(job, batch)
                call.generator_after = get_random_state()
                call.gradients = get_gradients(script.modules)
                call.state_after = copy_tensors(get_tensors(script.modules))
                calls.append(call)
            script.after_batch()
        return calls
    finally:
        torch.set_default_dtype(torch.float32)


def run_plain_step(step: Step, batch: Any) -> Any:
    """Run the plain script's lines for one step up to `optimizer.step()`, and return the results."""
    tensors = pytree.tree_map_only(torch.Tensor, torch.clone, pytree.tree_map(as_tensor, batch))
    if step.optimizer is None:
        with torch.no_grad():
            return call_with_batch(step.function, tensors)
    step.optimizer.zero_grad()  # gradients of a parameter that it does not step add up, as in jobs
    results = call_with_batch(step.function, tensors)
    loss = results["loss"] if isinstance(results, dict) else results[0] if isinstance(results, tuple) else results
    loss.mean().backward()
    return results


def as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" else leaf


def train_plainly(scenario: Scenario, dtype: torch.dtype, permuted: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return parameters and buffers after the plain script; `permuted` sums its batches in another order."""
    script, batches = start_scenario(scenario, dtype)
    for batch in batches:
        if permuted is not None:
            leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
            order = torch.randperm(leaves[0].shape[0], generator=permuted)
            batch = pytree.tree_map_only(Tensor, lambda leaf, order=order: leaf[order], batch)
        for step in script.steps:
            run_plain_step(step, batch)
            if step.optimizer is not None:
                step.optimizer.step()
        script.after_batch()
    return copy_tensors(get_tensors(script.modules))


def assert_exact(scenario: Scenario, workers: int, dtype: torch.dtype) -> None:
    """Run all comparisons for one scenario; see the notes at the top."""
    ranks = on_mesh(workers, train_on_mesh, scenario, dtype)
    try:
        assert_ranks_identical(ranks)
        assert_every_step_plain(scenario, dtype, ranks[0])
        assert_final_state_plain(scenario, dtype, ranks[0][-1].state_after)
    finally:
        torch.set_default_dtype(torch.float32)


def assert_ranks_identical(ranks: Sequence[Sequence[Call]]) -> None:
    """Assert that inputs and results are bitwise equal on every rank."""
    for rank, calls in enumerate(ranks):
        for number, (first, other) in enumerate(zip(ranks[0], calls, strict=True)):
            for (path, wanted), (_, found) in zip(iterate_leaves(first), iterate_leaves(other), strict=True):
                assert is_bitwise_equal(wanted, found), f"call {number}: {path} of rank {rank} is not rank 0's"


def iterate_leaves(call: Call) -> list[tuple[str, Any]]:
    found, _ = pytree.tree_flatten_with_path(vars(call))
    return [(pytree.keystr(path), leaf) for path, leaf in found]


def is_bitwise_equal(wanted: Any, found: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(wanted == found)
    equal_nan = torch.equal(wanted.isnan(), found.isnan())
    return wanted.dtype == found.dtype and equal_nan and torch.equal(wanted.nan_to_num(), found.nan_to_num())


def assert_every_step_plain(scenario: Scenario, dtype: torch.dtype, calls: Sequence[Call]) -> None:
    """Comparison (a)."""
    script, batches = start_scenario(scenario, dtype)
    numbered = iter(enumerate(calls))
    for batch in batches:
        for step in script.steps:
            number, call = next(numbered)
            assert_call_plain(script, step, batch, call, dtype=dtype, vanishing=scenario.vanishing, number=number)
        script.after_batch()
    assert next(numbered, None) is None


def assert_call_plain(
    script: Script,
    step: Step,
    batch: Any,
    call: Call,
    *,
    dtype: torch.dtype,
    vanishing: Sequence[str],
    number: int,
) -> None:
    label = f"call {number}"
    with torch.no_grad():
        for name, tensor in get_tensors(script.modules).items():
            tensor.copy_(call.state[name])
    set_random_state(call.generator)
    results = run_plain_step(step, batch)
    assert torch.equal(get_random_state(), call.generator_after), f"{label}: the generator moved differently"
    assert_results_close(call.results, results, dtype, label)
    if step.optimizer is not None:
        assert_gradients_close(call.gradients, get_gradients(script.modules), dtype, vanishing, label)
        # A schedule counts the optimizer's steps; what this one makes of the parameters, the next call overwrites.
        step.optimizer.step()
    for name, tensor in get_tensors(script.modules).items():
        if not isinstance(tensor, nn.Parameter):
            assert_near(call.state_after[name], tensor, dtype, f"{label}: buffer {name}")


def assert_results_close(found: Any, wanted: Any, dtype: torch.dtype, label: str) -> None:
    found_leaves, found_spec = pytree.tree_flatten(found)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert found_spec == wanted_spec, f"{label}: results of another structure"
    for place, (ours, plain) in enumerate(zip(found_leaves, wanted_leaves, strict=True)):
        if isinstance(plain, Tensor):
            assert not ours.requires_grad
            assert_near(ours, plain, dtype, f"{label}: result {place}")
        else:
            assert type(ours) is type(plain), f"{label}: result {place}"
            assert ours == plain, f"{label}: result {place}"


def assert_gradients_close(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    vanishing: Sequence[str],
    label: str,
) -> None:
    largest = max((get_scale(gradient) for gradient in wanted.values() if gradient is not None), default=0.0)
    for name, gradient in wanted.items():
        ours = found[name]
        assert (ours is None) == (gradient is None), f"{label}: gradient of {name}: {ours}, plainly {gradient}"
        if ours is None or gradient is None:
            continue
        if name.endswith(tuple(vanishing)):
            assert get_scale(gradient) <= BOUNDS[dtype] * largest, f"{label}: gradient of {name} does not vanish"
            assert_near(ours, gradient, dtype, f"{label}: gradient of {name}", floor=largest)
        else:
            assert_near(ours, gradient, dtype, f"{label}: gradient of {name}")


def get_scale(tensor: Tensor) -> float:
    """Return the largest finite entry."""
    values = tensor.detach().to(torch.float64).nan_to_num(0.0, 0.0, 0.0).abs()
    return float(values.max()) if values.numel() else 0.0


def difference(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest entry; infinite if NaN or inf differ."""
    ours, plain = found.detach().to(torch.float64), wanted.detach().to(torch.float64)
    finite = plain.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(ours.isnan(), plain.isnan()):
        return float("inf")
    largest = get_scale(torch.where(finite, ours - plain, 0.0))
    return largest / max(get_scale(plain), floor) if largest else 0.0


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, label: str, floor: float = 0.0) -> None:
    assert found.shape == wanted.shape, f"{label}: shape {list(found.shape)}, plainly {list(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{label}: {found.dtype}, plainly {wanted.dtype}"
    bound = BOUNDS[dtype] if wanted.is_floating_point() else 0.0
    off = difference(found, wanted, floor)
    assert off <= bound, f"{label}: off by {off:.3g}, allowed {bound}; {found.flatten()[:4]} {wanted.flatten()[:4]}"


def assert_final_state_plain(scenario: Scenario, dtype: torch.dtype, found: Mapping[str, Tensor]) -> None:
    """Comparison (b)."""
    wanted = train_plainly(scenario, dtype)
    if scenario.exact:
        largest = max(map(get_scale, wanted.values()))
        for name, tensor in wanted.items():
            floor = largest if name.endswith(tuple(scenario.vanishing)) else 0.0
            assert_near(found[name], tensor, dtype, f"after the last step: {name}", floor)
        return
    generator = torch.Generator(torch.get_default_device()).manual_seed(SEED)
    drift = max(largest_difference(train_plainly(scenario, dtype, generator), wanted) for _ in range(PERMUTATIONS))
    off = largest_difference(found, wanted)
    assert off <= DRIFTS * drift, f"after the last step: off by {off:.3g}, plain scripts by {drift:.3g}"


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max(difference(found[name], tensor) for name, tensor in wanted.items())


def sample_cases(scenarios: Sequence[Scenario], *workers: int) -> list[Any]:
    """Parameters (scenario, workers, dtype) for a test: a few combinations, and the others marked `exhaustive`.

    Each scenario gets one combination, neighbours others.
    """
    sizes = workers or (2, 3, 4)
    parameters = []
    for place, scenario in enumerate(scenarios):
        for turn, size in enumerate(sizes):
            for number, dtype in enumerate(scenario.dtypes):
                always = turn == place % len(sizes) and number == (place + turn) % len(scenario.dtypes)
                label = f"{scenario}, {size} workers, {str(dtype).removeprefix('torch.')}"
                marks = [] if always else [pytest.mark.exhaustive]
                parameters.append(pytest.param(scenario, size, dtype, marks=marks, id=label))
    return parameters
