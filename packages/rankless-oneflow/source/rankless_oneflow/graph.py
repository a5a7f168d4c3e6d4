"""The variables of jobs, and the two ways in which the body of a job runs.

Note [built once, run often]: a job has no model object: its layers name their variables. So the body runs once on
tensors without values (`BuildCall`), which shows the variables and the optimizer. From then on the body runs as a
captured job of Rankless, and its layers find their variables by name (`RunCall`). Code that runs within a captured job
reads only what stays as it is: Rankless compares each value that it reads before every call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .initializers import Initializer
from .missing import refuse


@dataclass(frozen=True)
class VariableSpec:
    """A variable as a layer asks for it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    initializer: Initializer
    is_trainable: bool = True


class Variables(nn.Module):
    """The variables of one job, or of all. In a module a name has no dots."""

    def add(self, name: str, value: nn.Parameter) -> None:
        """Add a variable."""
        self.register_parameter(name.replace(".", "/"), value)

    def find(self, name: str) -> nn.Parameter:
        """Return a variable."""
        found: nn.Parameter = getattr(self, name.replace(".", "/"))
        return found


class Call:
    """One run of a job's body."""

    def __init__(self, *, trains: bool) -> None:
        self.trains = trains
        self.optimizers: list[Any] = []
        self.losses: list[Tensor] = []
        self._counts: dict[str, int] = {}

    def name_layer(self, given: str | None, kind: str) -> str:
        """Return the name of a layer: the script's, or "Dense", "Dense_1" and so on in the order of the body."""
        if given is not None:
            return given
        count = self._counts.get(kind, 0)
        self._counts[kind] = count + 1
        return f"{kind}_{count}" if count else kind

    def variable(self, spec: VariableSpec) -> Tensor:
        """Return a variable."""
        raise NotImplementedError

    def minimize(self, optimizer: Any, losses: Sequence[Tensor]) -> None:
        """Note the job's optimizer, and the losses that it minimizes."""
        self.optimizers.append(optimizer)
        self.losses.extend(losses)

    def loss(self) -> Tensor:
        """Return the loss: one, of any shape, whose mean Rankless minimizes; or the sum of the means of several."""
        return self.losses[0] if len(self.losses) == 1 else torch.stack([each.mean() for each in self.losses]).sum()


class BuildCall(Call):
    """The first run of a body, on tensors without values."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__(trains=trains)
        self.specs: dict[str, VariableSpec] = {}

    def variable(self, spec: VariableSpec) -> Tensor:
        """Note the variable, and return a tensor of its shape."""
        if spec.name in self.specs:
            fix = "give each layer a name= of its own"
            raise refuse("flow.layers", f"two layers that make variable {spec.name!r}", fix)
        if not spec.dtype.is_floating_point:
            fix = "declare the placeholder with dtype=flow.float, and pass such an array"
            raise refuse("flow.layers", f"an input of {spec.dtype} to the layer of {spec.name!r}", fix)
        self.specs[spec.name] = spec
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.is_trainable)


class RunCall(Call):
    """A later run of a body, on the variables."""

    def __init__(self, variables: Variables, *, trains: bool) -> None:
        super().__init__(trains=trains)
        self._variables = variables

    def variable(self, spec: VariableSpec) -> Tensor:
        """Return the variable of that name."""
        return self._variables.find(spec.name)


_CALLS: list[Call] = []
"""The calls in progress: one, or none. Before and after a captured job it has the same content."""


@contextmanager
def during(call: Call) -> Iterator[None]:
    """Within the context, layers and optimizers belong to `call`."""
    if _CALLS:
        fix = "share a plain function of layers between the jobs"
        raise refuse("flow.global_function", "a call of a job within another job", fix)
    _CALLS.append(call)
    try:
        yield
    finally:
        _CALLS.pop()


def current_call(name: str) -> Call:
    """Return the call whose body runs. Raises `ConfigError` outside the bodies of jobs."""
    if not _CALLS:
        raise refuse(name, "a call outside all jobs", "move it into a job, or a function that the job calls")
    return _CALLS[-1]
