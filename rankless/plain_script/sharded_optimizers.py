"""ZeRO for a script that knows no ranks: its optimizers step on this rank's shards of the parameters.

Note [sharded optimizers]: the script, its models and its optimizers keep whole plain parameters. `step` of PyTorch's
optimizers is replaced below the hooks of a step, so hooks, schedulers and scalers see whole parameters before and after
it. Within it the optimizer has shards; see Note [steps on shards]. Then the ranks gather the parameters, and the
optimizer's state consists of divided tensors, which are whole for any code that reads them. Each optimizer divides its
parameters for itself, because an optimizer that reads whole tensors needs another division. What cannot be divided
exactly stays whole on every rank: small parameters, sparse gradients, and optimizers that Rankless does not know.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankless.compiler.sharding.redistribute import Redistribution
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.logical_view.call_observers import OBSERVERS, REASONS, MoveReason, send_move
from rankless.logical_view.tensor import LogicalView
from rankless.ownership.optimizer_parameter_shards import DividedParameter, gather_after_step, make_divided_parameter
from rankless.ownership.partitioned_tensor import find_partition
from rankless.ownership.shard_layout import ShardLayout, assign, divide
from rankless.ownership.step_on_shards import ELEMENTWISE, READS_WHOLE, list_parameters, on_shards, share_state
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Replicate, Shard
from rankless.records.parallel_plan import StatePlan
from rankless.user_code import script_line

STEPS_ON_SHARDS = (*ELEMENTWISE, *READS_WHOLE)
Step = Callable[..., Any]


class ShardedOptimizers:
    """The optimizers of a script, if `zero` of the view says that their state is divided.

    Args:
        view: The ranks.
    """

    def __init__(self, view: LogicalView) -> None:
        self._view = view
        self._values = view.shards.values
        self._divided: WeakKeyDictionary[Optimizer, dict[int, DividedParameter]] = WeakKeyDictionary()
        """The parameters that each optimizer steps in shards, by id."""
        self._notified: list[type[Optimizer]] = []
        """The kinds of optimizers of whose whole state the user knows."""

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Within the context, the steps of PyTorch's optimizers are replaced."""
        add_group = Optimizer.add_param_group

        @functools.wraps(add_group)
        def add_parameters(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            add_group(optimizer, param_group)
            if self._view.zero == "gradients":  # those before the first step are divided too
                self._divide(optimizer)

        changed = [(kind, "step", self._replace_step(kind.step)) for kind in STEPS_ON_SHARDS if "step" in vars(kind)]
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._notify_whole(optimizer))
        with replace_attributes((Optimizer, "add_param_group", add_parameters), *changed):
            yield
        hook.remove()

    def _replace_step(self, step: Any) -> Any:
        """Return the step of a class. PyTorch has put its hooks around it if there are objects of this class."""
        is_hooked = hasattr(step, "hooked")
        inner = step.__wrapped__ if is_hooked else step

        @functools.wraps(inner)
        def step_on_shards(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            divided = {} if self._view.zero is None else self._divide(optimizer)
            return self._step(inner, optimizer, closure, divided) if divided else inner(optimizer, closure)

        if not is_hooked:
            return step_on_shards
        hooked: Any = Optimizer.profile_hook_step(step_on_shards)
        hooked.hooked = True
        return hooked

    def _step(
        self, step: Step, optimizer: Optimizer, closure: Callable[[], Any] | None, divided: dict[int, DividedParameter]
    ) -> Any:
        """Return what an optimizer's step returns, which steps on shards."""
        loss = None
        if closure is not None:  # as all these optimizers begin
            with torch.enable_grad():
                loss = closure()
            divided = self._divide(optimizer)
        values, members = self._values, list(divided.values())
        values.write_back()
        for member in members:
            for value in optimizer.state.get(member.parameter, {}).values():
                if type(value) is Tensor and value.dim():  # a loaded one: it stays the object that the script has
                    value.was_divided = True  # type: ignore[attr-defined]
        unscale_gradients(optimizer)
        try:
            with on_shards(optimizer, divided, values):
                step(optimizer)
        finally:
            share_state(optimizer, divided, values)
            states = [optimizer.state.get(member.parameter, {}) for member in members]
            shown = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            values.find_open(filter(None, map(find_partition, shown)))
            stepped = [member for member in members if member.parameter.grad is not None]
            send_gathers(stepped, self._view.axis)
            gather_after_step(stepped, self._view.axis)
            values.refresh()
        return loss

    def _divide(self, optimizer: Optimizer) -> dict[int, DividedParameter]:
        """Return the parameters that an optimizer steps in shards, by id, and divide those that are new or changed."""
        known, found = self._divided.get(optimizer, {}), dict[int, DividedParameter]()
        self._divided[optimizer] = found
        is_kept_whole = any(group.get("differentiable") for group in optimizer.param_groups)
        if type(optimizer) not in STEPS_ON_SHARDS or is_kept_whole:
            return found
        loads = [
            sum(each.parameter.nbytes for each in known.values() if each.has_rows(rank))
            for rank in range(self._view.axis.size)
        ]
        for number, parameter in enumerate(list_parameters(optimizer)):
            gradient = parameter.grad
            if type(parameter) not in (Tensor, Parameter) or (gradient is not None and gradient.is_sparse):
                continue
            member = known.get(id(parameter))
            if member is None or not fits(member):
                member = self._divide_one(optimizer, parameter, number, loads)
            if member is not None:
                found[id(parameter)] = member
        return found

    def _divide_one(
        self, optimizer: Optimizer, parameter: Any, number: int, loads: list[int]
    ) -> DividedParameter | None:
        """Divide a parameter; return None for one that stays whole."""
        axis, is_whole = self._view.axis, type(optimizer) in READS_WHOLE
        division = assign(parameter, axis, loads) if is_whole else divide(parameter, axis, ())
        if division is None:
            return None
        layout = ShardLayout.of(parameter, Shard(division.dim, division.lengths))
        if self._view.zero == "gradients" and not is_whole:
            self._view.shards.divide(parameter, layout)
        dtype = str(parameter.dtype).removeprefix("torch.")
        state = StatePlan(shape=layout.shape, dtype=dtype, optimizer_state=(division,))
        name = f"parameter {number} of {type(optimizer).__name__}"
        return make_divided_parameter(parameter, layout, self._values, name=name, state=state, shared=None)

    def _notify_whole(self, optimizer: Optimizer) -> None:
        """Tell the user of an optimizer whose state every rank holds."""
        kind = type(optimizer)
        if self._view.zero is not None and kind not in (*STEPS_ON_SHARDS, *self._notified):
            self._notified.append(kind)
            self._view.notify(
                f"{script_line(sys._getframe(1))}: every worker holds the whole state of {kind.__qualname__}, which is "
                f"not one of PyTorch's that step on shards (correct, but --zero saves no memory for it)"
            )


def send_gathers(stepped: Sequence[DividedParameter], axis: MeshAxis) -> None:
    """Tell the observers of the view that parameters are gathered after a step."""
    if not OBSERVERS:
        return
    REASONS.append(MoveReason("output", "whole parameters after the step"))
    for member in stepped:
        target = Redistribution(axis, member.layout.placement, Replicate())
        send_move(member.parameter.detach(), target, member.layout.shape, [member.parameter])
    REASONS.pop()


def unscale_gradients(optimizer: Optimizer) -> None:
    """Unscale the gradients of an optimizer that would do it in its step, and so in its shards alone."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)  # that of a `GradScaler`, for a fused step
    if scale is None or bool(optimizer.found_inf):  # type: ignore[attr-defined]
        return
    for parameter in list_parameters(optimizer):
        gradient = parameter.grad
        known = None if gradient is None else find_partition(gradient)
        held = gradient if known is None else known.shard if known.whole is None else known.whole
        if held is not None:
            held.detach().div_(scale)
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def fits(member: DividedParameter) -> bool:
    """Return whether a parameter still lies as when it was divided. A script may convert or move it."""
    parameter, layout = member.parameter, member.layout
    kinds = (member.shard.dtype, member.shard.device) == (parameter.dtype, parameter.device)
    return kinds and layout == ShardLayout.of(parameter, layout.placement)
