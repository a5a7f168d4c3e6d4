"""What a job does besides computing: effects that happen once, at capture, and so would be lost or wrong."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rankless.errors import CaptureError
from rankless.program.guards import Length, guards_of, is_simple


class Effects:
    """Watches the passes of a capture. Only the last pass counts: in the first a model may set itself up."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        self._function = function
        self._modules = modules
        self._generator = generator_state()
        self._found: CaptureError | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """One pass: what the job changes while it runs inside is noted."""
        guards = guards_of(self._function, self._modules)
        tables = [
            (f"{name}.{path}" if path else name, part, dict(part._buffers), dict(part._parameters))
            for name, module in self._modules.items()
            for path, part in module.named_modules()
        ]
        yield
        self._found = None
        changed = guards.first_changed()
        if changed is not None:
            self._found = CaptureError(
                expected="a job that leaves Python values as they are: its Python runs once, not at every step",
                found=f"{changed.label} was {brief(changed.value)} and is {brief(changed.read())} after the job",
                fix="count, collect or change it outside the job, or keep it in a buffer and change that in place",
            )
        for path, part, buffers, parameters in tables:
            replaced = first_replaced(part._buffers, buffers) or first_replaced(part._parameters, parameters)
            if replaced is not None:
                self._found = CaptureError(
                    expected="buffers and parameters that stay the same tensors",
                    found=f"{path}.{replaced} is replaced by another tensor inside the job",
                    fix=f"change it in place: self.{replaced}.copy_(new)",
                )
        if generator_state() != self._generator:
            self._found = CaptureError(
                expected="a job that leaves torch's generator to its random operators",
                found="the job seeds torch's generator, or draws from it for a value of Python's",
                fix="call torch.manual_seed outside the job",
            )

    def require_none(self) -> None:
        """Raise what the last pass has shown."""
        if self._found is not None:
            raise self._found


def require_no_parameter_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Refuse hooks on parameters: gradients are made by the program, which would not call them."""
    for name, module in modules.items():
        for path, parameter in module.named_parameters(prefix=name):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise CaptureError(
                    expected="parameters without hooks of their own",
                    found=f"a hook on parameter {path}, which would not be called",
                    fix="do what the hook does in the job, on a tensor, or after it, on .grad",
                )


def generator_state() -> bytes:
    """The state of torch's generator, read past the modes of a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.get_rng_state().numpy().tobytes()


def first_replaced(now: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]) -> str | None:
    """The first name under which another object stands."""
    names = [*before, *(name for name in now if name not in before)]
    return next((name for name in names if now.get(name) is not before.get(name)), None)


def brief(value: Any) -> str:
    """A value in few letters; tensors of a capture have no numbers to show."""
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, Length):
        return f"of length {value.length}"
    if isinstance(value, list | tuple | set | dict):
        return f"of length {len(value)}" if not is_simple(value) else f"{value!r:.40}"
    return f"{value!r:.40}"
