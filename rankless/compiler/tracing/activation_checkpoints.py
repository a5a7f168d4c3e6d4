"""Activation checkpoints during capture.

PyTorch's reentrant checkpoint calls `backward()` within the backward pass, which a trace cannot follow. Its other
implementation gives the same gradients. What else differs is kept: without a tensor argument that requires a gradient,
parameters get none.

A trace has one forward pass and no second one in backward. Its operators carry the number of their checkpoint, and
`rankless.compiler.lowering.recomputation` lets the program compute them again. PyTorch's second pass would also change
buffers a second time, as the running statistics of batch norm. Such a checkpoint is refused.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.errors import CaptureError
from rankless.torch_versions import find_name
from rankless.user_code import user_line


class TraceableCheckpoint:
    """What runs in place of `torch.utils.checkpoint.CheckpointFunction`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run a function so that its intermediate results may be computed again in backward."""
        checkpoints.check_backward_validity(args)
        if torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in args):
            return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        with torch.no_grad():
            return function(*args)


class CheckpointNumbers:
    """The number of the activation checkpoint in which a trace is. Of nested ones the outermost counts."""

    def __init__(self) -> None:
        self.current: int | None = None
        """None outside of checkpoints."""
        self._count = 0

    def begin_pass(self) -> None:
        """Number the checkpoints of another pass from the start, because PyTorch traces a function several times."""
        self.current, self._count = None, 0

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Within the context, the trace is in a checkpoint."""
        before = self.current
        if before is None:
            self.current = self._count
            self._count += 1
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def trace_checkpoints(modules: Mapping[str, nn.Module], numbers: CheckpointNumbers) -> Iterator[None]:
    """Within the context, reentrant checkpoints can be traced, and those that change buffers are refused.

    Args:
        modules: The modules of the job, whose buffers count.
        numbers: Receives the number of the checkpoint in which the trace is.
    """
    generator = find_name(checkpoints, "_checkpoint_without_reentrant_generator_impl")
    run_checkpoint = getattr(checkpoints, generator)

    def run_and_compare(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if not torch.is_grad_enabled():
            yield from run_checkpoint(*args, **kwargs)
            return
        values = read_buffers(modules)
        with numbers.enter():
            yield from run_checkpoint(*args, **kwargs)
        if torch.is_grad_enabled():
            require_same_buffers(values, read_buffers(modules))

    with replace_attributes(
        (checkpoints, "CheckpointFunction", TraceableCheckpoint), (checkpoints, generator, run_and_compare)
    ):
        yield


def read_buffers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the traced values of the buffers of modules by name: a change in place gives a buffer another one."""
    values: dict[str, Tensor] = {}
    for name, module in modules.items():
        for key, buffer in module.named_buffers():
            inner = getattr(buffer, "elem", buffer)
            if torch._is_functional_tensor(inner):
                torch._sync(inner)  # type: ignore[attr-defined, no-untyped-call]  # PyTorch's stubs lack it
                values[f"{name}.{key}"] = torch._from_functional_tensor(inner)
    return values


def require_same_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` if a buffer has changed."""
    changed = [name for name, value in before.items() if after.get(name) is not value]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CaptureError(
            expected="a checkpointed function that changes no buffers, as batch norm in training does",
            found=f"buffer {changed[0]!r}{more}, which PyTorch changes twice: in forward, and again in backward",
            fix="leave batch norm out of torch.utils.checkpoint",
            where=user_line(sys._getframe(1)),
        )
