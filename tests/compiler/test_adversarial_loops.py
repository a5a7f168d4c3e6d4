"""The scripts of the adversarial cases as ordinary loops in the logical view, those too that no job can capture."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from adversarial_cases import (
    AdversarialCase,
    CallState,
    assert_alike,
    record_call,
    run_plain,
    start_script,
    without_layout,
)
from support.processes import on_mesh
from test_adversarial_cases import CASES as ALL_CASES
from test_adversarial_cases import ROUNDED_PER_RANK
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView, shard_rows
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import split_lengths

pytestmark = pytest.mark.slow

DIFFERS_EACH_TIME = {"wall_clock"}
CASES = [case for case in ALL_CASES if str(case) not in ROUNDED_PER_RANK | DIFFERS_EACH_TIME]
GROUP = 12
GROUPS = [CASES[start : start + GROUP] for start in range(0, len(CASES), GROUP)]
IN_CI = (0, 5)


def divide(value: Any, view: LogicalView) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.requires_grad:
        return value
    if value.dim() == 0 or len(value) < view.mesh.size:
        return value
    lengths = split_lengths(len(value), view.mesh.size)
    start = sum(lengths[: view.mesh.rank])
    return shard_rows(value[start : start + lengths[view.mesh.rank]].clone(), lengths, view)


def make_whole(value: Any) -> Any:
    return value.whole().detach() if isinstance(value, DividedTensor) else value


def run_loop(case: AdversarialCase, view: LogicalView) -> list[CallState]:
    script, optimizer = start_script(case)
    calls = []
    for number, whole in enumerate(script.batches):
        batch = pytree.tree_map(lambda leaf: divide(leaf, view), whole)
        script.before_call(number)
        optimizer.zero_grad()
        results = script.function(*batch)
        loss = results[0] if isinstance(results, tuple) else results
        loss.mean().backward()
        optimizer.step()
        calls.append(record_call(script, pytree.tree_map(make_whole, results), pytree.tree_map(make_whole, batch)))
    return calls


def try_run(run: Any, *arguments: Any) -> list[CallState] | str:
    """Return the states after each call, without strides; or the script's error."""
    try:
        return without_layout(run(*arguments))
    except Exception as error:  # a script may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compare(mesh: Mesh, numbers: Sequence[int]) -> list[str]:
    view, differing = LogicalView(mesh, lambda _: None), []
    for number in numbers:
        case = CASES[number]
        wanted = try_run(run_plain, case)
        with LogicalBackward(view).install():
            found = try_run(run_loop, case, view)
        if isinstance(wanted, str) or isinstance(found, str):
            if wanted != found:
                differing.append(f"{case}: {found if isinstance(found, str) else 'no error'}, plainly {wanted}"[:400])
            continue
        try:
            assert_alike(found, wanted, max(case.tolerance, 1e-11))
        except AssertionError as error:
            differing.append(f"{case}: {error}"[:400])
    return differing


@pytest.mark.parametrize(
    ("group", "workers"),
    [
        pytest.param(group, workers, marks=() if workers == 2 and group in IN_CI else pytest.mark.exhaustive)
        for workers in (2, 3)
        for group in range(len(GROUPS))
    ],
)
def test_adversarial_scripts_train_as_on_one_device(group: int, workers: int) -> None:
    numbers = range(group * GROUP, min(len(CASES), group * GROUP + GROUP))
    with torch.random.fork_rng(devices=[]):
        for differing in on_mesh(workers, compare, numbers):
            assert not differing, "\n".join(differing)
