"""A training as a script has it, run as a job and as plain PyTorch.

It uses nothing of Rankless but its public functions, so that it runs with earlier versions, too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rankless

BOUND = 1e-11


@dataclass(kw_only=True)
class Training:
    """A training as a script has it, and what the script sees of it."""

    function: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    model: nn.Module = field(default_factory=lambda: nn.Linear(2, 1).double())
    optimizer: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `rankless.job`. Plain PyTorch clips by `clip_norm`."""
    between: Callable[[], None] = lambda: None
    """What the script does after each call."""
    seen: Callable[[], Sequence[Tensor]] = lambda: ()
    """What the script looks at in the end, besides the results, the model and its gradients."""


def run_plain(build: Callable[[], Training]) -> list[Tensor]:
    """Run a training as plain PyTorch."""
    torch.manual_seed(0)
    training = build()

    def call(*arguments: Any) -> Any:
        if training.optimizer is None:
            with torch.no_grad():
                return training.function(*arguments)
        loss = training.function(*arguments)
        training.optimizer.zero_grad()
        loss.backward()
        if "clip_norm" in training.options:
            nn.utils.clip_grad_norm_(training.model.parameters(), training.options["clip_norm"])
        training.optimizer.step()
        return loss

    return run(training, call)


def run_job(build: Callable[[], Training]) -> list[Tensor]:
    """Run a training as a job."""
    torch.manual_seed(0)
    training = build()
    given = {"model": training.model, **({} if training.optimizer is None else {"optimizer": training.optimizer})}
    return run(training, rankless.job(**given, **training.options)(training.function))


def run(training: Training, call: Callable[..., Any]) -> list[Tensor]:
    """Return everything that a script sees of a training, and the next random number."""
    results = []
    for arguments in training.batches:
        results.append(call(*arguments))
        training.between()
    model = [*training.model.parameters(), *training.model.buffers()]
    gradients = [item.grad for item in training.model.parameters() if item.grad is not None]
    return [item.detach().clone() for item in (*results, *model, *gradients, *training.seen(), torch.rand(1))]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Say in what a training differs from the plain one, or return "same"."""
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {number} has another shape or dtype"
        wide = [item.to_dense().to(torch.complex128) for item in (one, other)]
        error = float((wide[0] - wide[1]).abs().max() / wide[1].abs().max().clamp(min=1))
        bound = 1e-3 if one.dtype == torch.float16 else BOUND
        if not error <= bound:
            return f"tensor {number} of {len(found)} differs by {error:.2g}"
    return "same"


def outcome(build: Callable[[], Training]) -> str:
    """Return "same", what differs, or the error, and whether it names a line that says `# refused here`."""
    expected = run_plain(build)
    try:
        return difference(run_job(build), expected)
    except rankless.RanklessError as error:
        line = re.search(rf"{Path(build.__code__.co_filename).name}:(\d+)", str(error))
        source = Path(build.__code__.co_filename).read_text().splitlines()
        is_marked = line is not None and source[int(line[1]) - 1].endswith("# refused here")
        return f"{'refused' if is_marked else 'refused elsewhere'}: {error}"
    except Exception as error:
        return f"crash: {error!r}"
