"""`hvd.DistributedOptimizer`: the user's optimizer, whose step first combines the gradients of all ranks.

Note [one class for each]: the result has a class made for it, a subclass of the optimizer's own class with the same
name. So `isinstance`, learning rate schedulers and printed forms work as before. The result shares the optimizer's
groups, state, defaults and hooks. So a scheduler made for the plain optimizer keeps working, and a loaded state is
kept.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.basics import size
from rankless.extensions.horovod.common.builds import rocm_built
from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.extensions.horovod.torch.compression import Compression, Compressor
from rankless.extensions.horovod.torch.gradients import (
    BackwardPasses,
    GradientReduction,
    GradientRule,
    Groups,
    check_groups,
    make_groups,
)
from rankless.extensions.horovod.torch.operations.checks import validate_tensor
from rankless.extensions.horovod.torch.operations.reduction_rule import Adasum, Average, make_reduction_rule
from rankless.extensions.horovodrun.launched_worker import horovod_variables

MODULE_NAME = "horovod.torch.optimizer"
"""The module that scripts expect in the class's `__module__`."""

STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class DistributedOptimizerMixin(torch.optim.Optimizer):
    """The methods that both kinds of distributed optimizer have."""

    _wrapped_class: type[torch.optim.Optimizer]
    """The class of the user's optimizer."""
    _reduction: Any
    _parameter_names: dict[torch.Tensor, str]
    """The names of all parameters. Tools read this and the following under Horovod's names."""
    _compression: type[Compressor]
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes after which a gradient is complete."""
        return self._reduction.passes.passes  # type: ignore[no-any-return]  # both reductions have it

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._reduction.passes.passes = passes

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """How many backward passes each reduced parameter still needs."""
        return self._reduction.passes.remaining  # type: ignore[no-any-return]  # both reductions have it

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters that are reduced."""
        return set(self._reduction.passes.remaining)

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[int | None, Any]]:
        """The handle and the compressor's context of each gradient that backward has computed since the last step.

        The handle is None if the gradient is not submitted yet.
        """
        return self._reduction.get_handles()  # type: ignore[no-any-return]  # both reductions have it

    @property
    def _grad_accs(self) -> list[Any]:
        """The node of autograd that accumulates the gradient of each reduced parameter."""
        with torch.enable_grad():
            return [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in self._requires_update]  # type: ignore[union-attr]  # a parameter's expansion has a node

    def _make_hook(self, p: torch.Tensor) -> Callable[..., None]:
        """Return a function that counts a backward pass of a parameter, whatever its arguments."""
        return lambda *_: self._reduction.passes.count(p)

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set[Any]:
        """Return the items that occur more than once."""
        return {item for item, count in Counter(lst).items() if count > 1}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes after which a gradient is complete."""
        self._reduction.passes.passes = passes

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """Do as the plain optimizer. Raises AssertionError while gradients are being reduced."""
        if self._reduction.passes.has_gradients:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        self._wrapped_class.zero_grad(self, *arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        """Do as the plain optimizer, and discard gradients that are being reduced."""
        self._reduction.restart()
        groups, state = self.param_groups, self.state
        self._wrapped_class.load_state_dict(self, *arguments, **keywords)
        # PyTorch makes new groups and state. The plain optimizer, and its schedulers, keep the old objects.
        for old, new in zip(groups, self.param_groups, strict=True):
            if old is not new:
                old.clear()
                old.update(new)
        self.param_groups = groups
        if self.state is not state:
            state.clear()
            state.update(self.state)
            self.state = state


class AllreduceOptimizer(DistributedOptimizerMixin):
    """An optimizer that steps with the combined gradients of all ranks."""

    _synchronized = False
    _should_synchronize = True

    @property
    def _groups(self) -> list[list[torch.Tensor]] | None:
        """The parameters whose gradients are reduced together; None without groups."""
        return self._reduction.groups or None

    def _register_hooks(self) -> None:
        """Reduce the parameters that `add_param_group` has added, too. All ranks call this, or none."""
        if not self._requires_update:
            return  # no gradients are reduced
        added = {
            parameter: f"allreduce.noname.{group_number}.{number}"
            for group_number, group in enumerate(self.param_groups)
            for number, parameter in enumerate(group["params"])
            if parameter.requires_grad and parameter not in self._parameter_names
        }
        self._parameter_names.update(added)
        self._reduction.add(added)

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Submit a parameter's gradient now. Returns its handle and the compressor's context, as Horovod does."""
        handle: tuple[Any, Any] = self._reduction.send(p)
        return handle

    def synchronize(self) -> None:
        """Wait until every gradient is reduced: for example to clip gradients before `step` in `skip_synchronize`."""
        self._reduction.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the current gradients, for the duration of the block."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do as the plain optimizer, with reduced gradients. Gradients that the closure computes are reduced, too."""
        if not self._should_synchronize:
            self._synchronized = False
            return self._wrapped_class.step(self, closure)
        if self._synchronized:
            warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=2)

        def evaluate() -> Any:
            loss = closure() if closure is not None else None
            self._reduction.synchronize()
            return loss

        if closure is None:
            evaluate()
        self._synchronized = False
        return self._wrapped_class.step(self, None if closure is None else evaluate)


class AdasumOptimizer(DistributedOptimizerMixin):
    """An optimizer whose changes to the parameters are combined by Adasum."""

    def synchronize(self) -> None:
        """Do nothing: Adasum combines the changes after the step."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: Adasum does not support it."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank alone, then combine the changes of all ranks."""
        loss = closure() if closure is not None else None
        self._reduction.step(lambda: self._wrapped_class.step(self))
        return loss


_DistributedOptimizer = AllreduceOptimizer
"""Horovod's name, which tools import."""
_DistributedAdasumOptimizer = AdasumOptimizer

# Keep PyTorch from wrapping the steps with the optimizer's hooks: the plain step inside them already runs these.
vars(AllreduceOptimizer)["step"].hooked = True
vars(AdasumOptimizer)["step"].hooked = True


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
    """Return the optimizer with gradients combined over the ranks, each as soon as backward has computed it.

    Args:
        optimizer: The user's optimizer. Outside the process set it is returned with plain behaviour.
        named_parameters: Pairs of name and parameter, from `model.named_parameters()`. Default numbered names.
        compression: How gradients are compressed for sending. Default `Compression.none`.
        backward_passes_per_step: The number of backward passes whose gradients are summed. Default 1.
        op: Average (default), Sum or Adasum. Adasum combines the changes that each rank's step makes.
        gradient_predivide_factor: The part of an Average's division that precedes the sum. Default 1.0.
        num_groups: The older name of `groups`.
        groups: The number of groups in which gradients are reduced together, or lists of their parameters.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones instead of gathered. Default False.
        process_set: The ranks that combine their gradients. Default all.

    Raises:
        ValueError: Arguments exclude each other, `groups` is invalid, or names are not unique.
        NotImplementedError: Adasum with a process set, or with a number of ranks that is not a power of 2.
    """
    if gradient_predivide_factor != 1.0:
        _check_predivision(op)
    groups = _resolve_groups(num_groups, groups)
    names = assign_parameter_names(optimizer, named_parameters)
    attributes = {
        "_parameter_names": names, "_compression": compression, "op": op, "process_set": process_set,
        "gradient_predivide_factor": gradient_predivide_factor, "sparse_as_dense": sparse_as_dense,
    }  # fmt: skip
    is_participating = process_set.included() and (size() > 1 or horovod_variables().get("ELASTIC") == "1")
    reduced = {parameter: name for parameter, name in names.items() if is_participating and parameter.requires_grad}
    if op == Adasum and size() > 1:
        make_reduction_rule(op, 1.0, 1.0, process_set)
        adasum = AdasumReduction(reduced, backward_passes_per_step, compression)
        return _make_distributed(optimizer, AdasumOptimizer, adasum, attributes)
    reduction_rule = make_reduction_rule(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor, process_set)
    rule = GradientRule(reduction_rule, compression, sparse_as_dense)
    gradient_groups = make_groups(groups, reduced, process_set) if reduced else {}
    reduction = GradientReduction(reduced, backward_passes_per_step, rule, gradient_groups)
    return _make_distributed(optimizer, AllreduceOptimizer, reduction, attributes)


DistributedOptimizer.__module__ = MODULE_NAME


def _resolve_groups(num_groups: int, groups: Groups | None) -> Groups | None:
    """Return the groups of a call, which may use the older name. Raises ValueError for invalid ones."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    check_groups(groups)
    return groups


def _check_predivision(op: int) -> None:
    if rocm_built():
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


class AdasumReduction:
    """Combines the changes that a step makes to the parameters."""

    def __init__(self, names: Mapping[torch.Tensor, str], passes: int, compression: type[Compressor]) -> None:
        self.passes = BackwardPasses(names, passes, lambda _: None)
        self._names = names
        self._compression = compression

    def restart(self) -> None:
        """Restart the count of backward passes."""
        self.passes.restart()

    def get_handles(self) -> dict[torch.Tensor, tuple[int | None, Any]]:
        """Return no handles: nothing is submitted before the step."""
        return {}

    @torch.no_grad()
    def step(self, step: Callable[[], object]) -> None:
        """Call `step`, and replace its changes to the parameters by the Adasum of all ranks' changes."""
        initial_values = {parameter: parameter.detach().clone() for parameter in self._names}
        step()
        scheduler = context.current().scheduler
        handle = scheduler.new_handle()
        requests, contexts = [], []
        for parameter, initial_value in initial_values.items():
            compressed, compression_context = self._compression.compress(
                (parameter.detach() - initial_value).contiguous()
            )
            buffer = validate_tensor(compressed)
            name = self._names[parameter]
            requests.append(
                EngineRequest(
                    kind=OperationKind.ALLREDUCE, name=name, tensor=buffer, output=buffer, reduction=ReduceOpCode.ADASUM
                )
            )
            contexts.append(compression_context)
        scheduler.submit(handle, requests)
        results = scheduler.synchronize(handle)
        for (parameter, initial_value), result, compression_context in zip(
            initial_values.items(), results, contexts, strict=True
        ):
            parameter.copy_(initial_value + self._compression.decompress(result, compression_context))
        self.restart()


def _make_distributed(
    optimizer: torch.optim.Optimizer,
    kind: type[DistributedOptimizerMixin],
    reduction: GradientReduction | AdasumReduction,
    attributes: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return an optimizer of a new class, with the attributes of the given one and others that tools read."""
    wrapped_class = type(optimizer)
    members = {
        name: member
        for source in (DistributedOptimizerMixin, kind)
        for name, member in vars(source).items()
        if name[:2] != "__"
    }
    distributed_class = type(
        wrapped_class.__name__,
        (wrapped_class,),
        {**members, "_wrapped_class": wrapped_class, "__module__": MODULE_NAME, "__doc__": wrapped_class.__doc__},
    )
    distributed: torch.optim.Optimizer = object.__new__(distributed_class)
    # A scheduler replaces an optimizer's `step` by one that counts. The members of the new class take precedence.
    shared = {name: value for name, value in vars(optimizer).items() if name not in members}
    vars(distributed).update(shared, **attributes, _reduction=reduction)
    return distributed


NOT_PAIRS = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
)


def assign_parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of the optimizer, in its order.

    Without `named_parameters`, a name consists of the indices of the group and of the parameter. Raises ValueError if
    `named_parameters` contains anything but pairs, repeats a name, or omits a parameter.
    """
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{group_index}.{index}"
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(NOT_PAIRS)
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(repeated))}"
        )
    names = {parameter: name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = [str(id(parameter)) for parameter in parameters if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(unnamed)}"
        )
    return {parameter: names[parameter] for parameter in parameters}
