"""What a job does besides computing: effects that happen once, at capture, and so would be lost or wrong."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from rankless.compiler.capture.training_calls import steps_refused
from rankless.compiler.guards.guard_discovery import Finder, found_by, guards_of
from rankless.compiler.guards.guards import Guards
from rankless.compiler.guards.python_tracer import Watch
from rankless.compiler.tracing.impure_calls import frozen_calls_refused
from rankless.errors import CaptureError

PLAIN_STATE = "a job that leaves Python values as they are: its Python runs once, not at every step"
OUTSIDE = "count, collect or change it outside the job, or keep it in a buffer and change that in place"


class Effects:
    """Watches the passes of a capture. Only the last pass counts: in the first a model may set itself up."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        self._function = function
        self._modules = modules
        self._generator = generator_state()
        self._training = {id(part): part.training for part in self._parts()}
        self._watch: Watch | None = None
        self._found: CaptureError | None = None
        self._trails: list[list[Any]] = [[]]
        self._same_code = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """One pass: what the job changes while it runs inside is noted. Yields a list for what it calls, in order."""
        for part in self._parts():
            part.training = self._training.setdefault(id(part), part.training)
        # What the first pass reads is not known before it.
        finder = None if self._watch is None else found_by(self._function, self._modules, self._watch)
        guards = None if finder is None else finder.result(None)
        tables = [
            (f"{name}.{path}" if path else name, part, dict(part._buffers), dict(part._parameters))
            for name, module in self._modules.items()
            for path, part in module.named_modules()
        ]
        is_first, watch = self._watch is None, Watch()
        self._trails.append([])
        with contextlib.ExitStack() as stack:
            stack.enter_context(frozen_calls_refused())
            stack.enter_context(steps_refused())
            if not is_first:
                # Print once.
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(watch.watching())
            yield self._trails[-1]
        watch.forget_passing()
        self._same_code = self._watch is not None and watch.codes.keys() <= self._watch.codes.keys()
        self._watch = watch
        self._found = None if finder is None or guards is None else changed(finder, guards)
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

    def settled(self) -> bool:
        """Whether the last two passes have run the same code, with the same plain values."""
        return self._same_code and self._trails[-1] == self._trails[-2]

    def require_settled(self) -> None:
        """Raise if the last two passes differ, with the first line that called something else."""
        for before, now in zip_longest(*self._trails[-2:]):
            if before != now:
                raise unsettled(before, now)
        if not self._same_code:
            raise unsettled(None, None)

    def guards(self) -> Guards:
        """The guards of what the last pass has read."""
        return guards_of(self._function, self._modules, self._watch, self._training)

    def modes_set(self) -> list[tuple[nn.Module, bool]]:
        """The modules that the job puts into another mode, with that mode."""
        return [(part, part.training) for part in self._parts() if self._training.get(id(part)) is not part.training]

    def printed(self) -> str | None:
        """The line of the first thing that the job prints or logs."""
        return None if self._watch is None else self._watch.printed

    def _parts(self) -> list[nn.Module]:
        return [part for module in self._modules.values() for part in module.modules()]


def changed(finder: Finder, guards: Guards) -> CaptureError | None:
    """The error for the first thing that the job has read and changed."""
    for label, iterator in finder.iterators.items():
        return CaptureError(
            expected=PLAIN_STATE,
            found=f"the job reads {label}, an iterator ({type(iterator).__name__}), which would move on once",
            fix="call next() outside the job and pass what it gives as an argument",
        )
    moved = guards.first_changed() or next((state for state in finder.states if not state.holds()), None)
    if moved is None:
        return None
    return CaptureError(expected=PLAIN_STATE, found=f"{moved.label} {moved.change()} after the job", fix=OUTSIDE)


def unsettled(before: Any, now: Any) -> CaptureError:
    """The error for a job that computes otherwise whenever its Python runs; each is a call, with its line."""
    was, found = ("nothing" if call is None else f"{call[0]}{call[2]}" for call in (before, now))
    where = next((call[1] for call in (now, before) if call is not None), "")
    return CaptureError(
        expected="a job that computes the same whenever its Python runs with arguments of the same kind",
        found=f"{found}, where it was {was} a moment before" if where else "other code that runs each time",
        fix="take what changes out of the job, and pass it as an argument",
        where=where or None,
    )


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


def require_initialised(modules: Mapping[str, nn.Module], line: str) -> None:
    """Refuse lazy modules that have no parameters yet: every rank must start from the same ones."""
    for name, module in modules.items():
        for path, tensor in (*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)):
            if is_lazy(tensor):
                raise CaptureError(
                    expected="modules whose parameters are made before the job's first call",
                    found=f"{path}, which a lazy module has not made yet",
                    fix="call the model once on a batch before the optimizer is made",
                    where=line or None,
                )


def generator_state() -> bytes:
    """The state of torch's generator, read past the modes of a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.get_rng_state().numpy().tobytes()


def first_replaced(now: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]) -> str | None:
    """The first name under which another object stands."""
    names = [*before, *(name for name in now if name not in before)]
    return next((name for name in names if now.get(name) is not before.get(name)), None)
