"""`hvd.DistributedOptimizer`: the user's optimizer, whose step first combines the gradients of all ranks.

Note [one class for each]: the result is of a class made for it, below the optimizer's own and with its name, so that
`isinstance`, learning rate schedulers and printed forms are as before. It shares the optimizer's groups, state,
defaults and hooks: a scheduler that was given the plain optimizer goes on working, and a loaded state is kept.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.torch.adasum_optimizer import DeltaReduction
from rankless.compat.horovod.torch.basics import size
from rankless.compat.horovod.torch.builds import rocm_built
from rankless.compat.horovod.torch.compression import Compression, Compressor
from rankless.compat.horovod.torch.gradient_groups import Groups, check_groups, make_groups
from rankless.compat.horovod.torch.gradients import GradientReduction, GradientRule
from rankless.compat.horovod.torch.operations.reductions import Adasum, Average, combining
from rankless.compat.horovod.torch.parameter_names import parameter_names
from rankless.config import environment

NAME = "horovod.torch.optimizer"
"""Where scripts expect the class to come from, and compare with."""

STEPPED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class LossWeights(torch.optim.Optimizer):
    """What both kinds of distributed optimizer have."""

    _plain: type[torch.optim.Optimizer]
    """The optimizer's own class."""
    _reduction: Any

    @property
    def backward_passes_per_step(self) -> int:
        """After how many backward passes a gradient is complete."""
        return self._reduction.passes.passes  # type: ignore[no-any-return]  # of two classes alike in this

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let a gradient be complete after so many backward passes."""
        self._reduction.passes.passes = passes

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """As the plain optimizer. Raises AssertionError while gradients are being reduced."""
        if self._reduction.passes.have_begun:
            raise AssertionError(TOO_EARLY)
        self._plain.zero_grad(self, *arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        """As the plain optimizer; gradients on their way are forgotten."""
        self._reduction.restart()
        groups, state = self.param_groups, self.state
        self._plain.load_state_dict(self, *arguments, **keywords)
        # PyTorch makes new ones; the plain optimizer, and who holds it, keeps what was there.
        for old, new in zip(groups, self.param_groups, strict=True):
            if old is not new:
                old.clear()
                old.update(new)
        self.param_groups = groups
        if self.state is not state:
            state.clear()
            state.update(self.state)
            self.state = state


class Reducing(LossWeights):
    """An optimizer that steps with the gradients of all ranks."""

    _is_synchronized = False
    _synchronizes = True

    def synchronize(self) -> None:
        """Wait until every gradient is reduced: to clip them, say, before `step` within `skip_synchronize`."""
        self._reduction.synchronize()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` takes the gradients as they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the plain optimizer, with reduced gradients; those that the closure computes are reduced, too."""
        if not self._synchronizes:
            self._is_synchronized = False
            return self._plain.step(self, closure)
        if self._is_synchronized:
            warnings.warn(STEPPED_TWICE, stacklevel=2)

        def reduced() -> Any:
            loss = closure() if closure is not None else None
            self._reduction.synchronize()
            return loss

        if closure is None:
            reduced()
        self._is_synchronized = False
        return self._plain.step(self, None if closure is None else reduced)


class Summing(LossWeights):
    """An optimizer whose changes to the parameters are combined by Adasum."""

    def synchronize(self) -> None:
        """Nothing: what is combined is known only after the step."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step without combining is none."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step alone, then combine the changes of all ranks."""
        loss = closure() if closure is not None else None
        self._reduction.step(lambda: self._plain.step(self))
        return loss


# PyTorch would wrap the steps in what runs an optimizer's hooks; the plain step inside them runs those already.
vars(Reducing)["step"].hooked = True
vars(Summing)["step"].hooked = True


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, with gradients combined over the ranks, each as soon as backward has computed it.

    Over `backward_passes_per_step` passes a gradient is summed. An Average is divided by `gradient_predivide_factor`
    before the sum, and by the rest after it. `groups`: how many groups of gradients, or which, go together. Sparse
    gradients are gathered, or reduced whole with `sparse_as_dense`. With op Adasum, what each rank's step changes is
    combined. Outside the process set it is the plain optimizer.
    """
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    check_groups(groups)
    names = parameter_names(optimizer, named_parameters)
    takes_part = process_set.included() and (size() > 1 or environment.horovod_variables().get("ELASTIC") == "1")
    reduced = {parameter: name for parameter, name in names.items() if takes_part and parameter.requires_grad}
    if op == Adasum and size() > 1:
        combining(op, 1.0, 1.0, process_set)
        return _wrapped(optimizer, Summing, DeltaReduction(reduced, backward_passes_per_step, compression))
    before, after = 1.0 / gradient_predivide_factor, gradient_predivide_factor
    rule = GradientRule(combining(op, before, after, process_set), compression, sparse_as_dense)
    made = make_groups(groups, reduced, process_set) if reduced else {}
    return _wrapped(optimizer, Reducing, GradientReduction(reduced, backward_passes_per_step, rule, made))


DistributedOptimizer.__module__ = NAME


def _wrapped(
    optimizer: torch.optim.Optimizer, kind: type[LossWeights], reduction: GradientReduction | DeltaReduction
) -> torch.optim.Optimizer:
    plain = type(optimizer)
    members = {name: member for each in (LossWeights, kind) for name, member in vars(each).items() if name[:2] != "__"}
    made = type(plain.__name__, (plain,), {**members, "_plain": plain, "__module__": NAME, "__doc__": plain.__doc__})
    wrapped: torch.optim.Optimizer = object.__new__(made)
    # A scheduler replaces an optimizer's `step` by one that counts: what the class has now goes before that.
    shared = {name: value for name, value in vars(optimizer).items() if name not in members}
    vars(wrapped).update(shared, _reduction=reduction)
    return wrapped
