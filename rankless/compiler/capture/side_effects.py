"""Detect side effects of a job: they happen once, during capture, and would be lost or wrong in later calls."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from rankless.compiler.capture.refused_training_calls import refuse_training_calls, refuse_untraced_changes
from rankless.compiler.guards.guard_discovery import GuardDiscovery, discover_guards
from rankless.compiler.guards.guards import GuardSet
from rankless.compiler.guards.python_tracer import PythonTracer
from rankless.compiler.tracing.impure_calls import refuse_python_impure_calls
from rankless.compiler.tracing.recomputed_weights import without_recomputed_weights
from rankless.errors import CaptureError

EXPECTED_NO_STATE_CHANGE = "a job that does not change Python values: its Python runs once, not at every step"
FIX_STATE_CHANGE = "count, collect or change it outside the job, or keep it in a buffer and change that in place"


class SideEffects:
    """Observes the passes of a capture. Only the last pass counts: a model may initialize itself in the first."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        self._function = function
        self._modules = modules
        self._generator = read_generator_state()
        self._training = {id(submodule): submodule.training for submodule in self._submodules()}
        self._tracer: PythonTracer | None = None
        self._error: CaptureError | None = None
        self._call_logs: list[list[Any]] = [[]]
        self._same_code = False

    @contextlib.contextmanager
    def trace_pass(self) -> Iterator[list[Any]]:
        """Observe one pass and record what the job changes. Yield a list that receives the job's calls in order."""
        for submodule in self._submodules():
            submodule.training = self._training.setdefault(id(submodule), submodule.training)
        # The first pass determines what the job reads.
        discovery = None if self._tracer is None else discover_guards(self._function, self._modules, self._tracer)
        guards = None if discovery is None else discovery.guard_set(None)
        tables = [
            (f"{name}.{path}" if path else name, submodule, dict(submodule._buffers), dict(submodule._parameters))
            for name, module in self._modules.items()
            for path, submodule in module.named_modules()
        ]
        is_first, tracer = self._tracer is None, PythonTracer()
        self._call_logs.append([])
        with contextlib.ExitStack() as stack:
            stack.enter_context(refuse_python_impure_calls())
            stack.enter_context(refuse_training_calls())
            stack.enter_context(refuse_untraced_changes())
            if not is_first:
                # The first pass already printed.
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(without_recomputed_weights(self._submodules()))
            stack.enter_context(tracer.trace())
            yield self._call_logs[-1]
        tracer.drop_temporaries()
        self._same_code = self._tracer is not None and tracer.codes.keys() <= self._tracer.codes.keys()
        self._tracer = tracer
        self._error = None if discovery is None or guards is None else find_state_change(discovery, guards)
        for path, submodule, buffers, parameters in tables:
            replaced = find_replaced(submodule._buffers, buffers) or find_replaced(submodule._parameters, parameters)
            if replaced is not None:
                self._error = CaptureError(
                    expected="buffers and parameters that stay the same tensors",
                    found=f"{path}.{replaced} is replaced by another tensor inside the job",
                    fix=f"change it in place: self.{replaced}.copy_(new)",
                )
        if read_generator_state() != self._generator:
            self._error = CaptureError(
                expected="a job whose random operators alone use torch's generator",
                found="the job seeds torch's generator, or draws a Python value from it",
                fix="call torch.manual_seed outside the job",
            )

    def raise_if_found(self) -> None:
        """Raise the error that the last pass found, if any."""
        if self._error is not None:
            raise self._error

    def is_stable(self) -> bool:
        """Return whether the last two passes ran the same code with the same plain values."""
        return self._same_code and self._call_logs[-1] == self._call_logs[-2]

    def require_stable(self) -> None:
        """Raise `CaptureError` with the first differing call if the last two passes differ."""
        for before, now in zip_longest(*self._call_logs[-2:]):
            if before != now:
                raise make_unstable_error(before, now)
        if not self._same_code:
            raise make_unstable_error(None, None)

    def collect_guards(self) -> GuardSet:
        """Return the guards on everything that the last pass read."""
        return discover_guards(self._function, self._modules, self._tracer).guard_set(self._training)

    def changed_modes(self) -> list[tuple[nn.Module, bool]]:
        """Return the modules whose train or eval mode the job changes, with the new mode."""
        return [
            (submodule, submodule.training)
            for submodule in self._submodules()
            if self._training.get(id(submodule)) is not submodule.training
        ]

    def first_print_line(self) -> str | None:
        """Return the line of the first thing that the job prints or logs; None if it prints nothing."""
        return None if self._tracer is None else self._tracer.print_line

    def _submodules(self) -> list[nn.Module]:
        return [submodule for module in self._modules.values() for submodule in module.modules()]


def find_state_change(discovery: GuardDiscovery, guards: GuardSet) -> CaptureError | None:
    """Return the error for the first value that the job both reads and changes; None if there is none."""
    for label, iterator in discovery.iterators.items():
        return CaptureError(
            expected=EXPECTED_NO_STATE_CHANGE,
            found=f"the job reads {label}, an iterator ({type(iterator).__name__}), which would advance only once",
            fix="call next() outside the job and pass the result as an argument",
        )
    change = guards.first_failing() or next((state for state in discovery.read_only_states if not state.holds()), None)
    if change is None:
        return None
    return CaptureError(
        expected=EXPECTED_NO_STATE_CHANGE,
        found=f"{change.label} {change.describe_change()} after the job",
        fix=FIX_STATE_CHANGE,
    )


def make_unstable_error(before: Any, now: Any) -> CaptureError:
    """Return the error for a job that computes something else each time its Python runs.

    `before` and `now` are the differing calls, each with its line.
    """
    was, found = ("nothing" if call is None else f"{call[0]}{call[2]}" for call in (before, now))
    where = next((call[1] for call in (now, before) if call is not None), "")
    return CaptureError(
        expected="a job that computes the same each time its Python runs with arguments of the same kind",
        found=f"{found}, where the previous pass had {was}" if where else "different code in each pass",
        fix="compute the changing value outside the job and pass it as an argument",
        where=where or None,
    )


def require_traceable_modules(modules: Mapping[str, nn.Module]) -> None:
    """Raise `CaptureError` for modules that a program cannot stand for.

    These are modules of torch.jit, whose code is not Python, and parameters with hooks, which a program would not call.
    """
    for name, module in modules.items():
        for path, submodule in module.named_modules(prefix=name):
            if isinstance(submodule, torch.jit.ScriptModule):
                raise CaptureError(
                    expected="modules whose code is Python",
                    found=f"{path}, a module of torch.jit",
                    fix="pass the module from before torch.jit.script or torch.jit.trace",
                )
        for path, parameter in module.named_parameters(prefix=name):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise CaptureError(
                    expected="parameters without hooks",
                    found=f"a hook on parameter {path}, which would not be called",
                    fix="do the hook's work in the job, on a tensor, or after the job, on .grad",
                )


def require_initialized(modules: Mapping[str, nn.Module], line: str) -> None:
    """Raise `CaptureError` for lazy modules without parameters: every rank must start from the same ones."""
    for name, module in modules.items():
        for path, tensor in (*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)):
            if is_lazy(tensor):
                raise CaptureError(
                    expected="modules whose parameters exist before the job's first call",
                    found=f"{path}, which a lazy module has not initialized yet",
                    fix="call the model once on a batch before you create the optimizer",
                    where=line or None,
                )


def read_generator_state() -> bytes:
    """Return the state of torch's generator, bypassing the modes of a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.get_rng_state().numpy().tobytes()


def find_replaced(now: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]) -> str | None:
    """Return the first name that now refers to another object; None if there is none."""
    names = [*before, *(name for name in now if name not in before)]
    return next((name for name in names if now.get(name) is not before.get(name)), None)
