"""Installs the logical view in a worker, before the first line of the script that uses torch."""

import atexit
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rankless.config.environment import read_worker_config
from rankless.context.world import World
from rankless.logical_view.agreement import RankAgreement
from rankless.logical_view.call_observers import OBSERVERS, send_call
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.logical_view.trace_call_to_program import TRACE_STATE
from rankless.plain_script.batch_random_draws import divide_draws
from rankless.plain_script.effects_on_first_rank import Effects
from rankless.plain_script.hide_ranks import hide_ranks
from rankless.plain_script.loaders import divide_batches
from rankless.plain_script.sharded_optimizers import ShardedOptimizers
from rankless.plain_script.step_notifications import ScriptSteps
from rankless.user_code import script_line

COMPARED = (bool, int, float, tuple, str)


def install(world: World, effects: Effects | None = None) -> LogicalView:
    """Let the script see one process with whole batches, until this process ends.

    Args:
        world: The ranks. Their mesh has the axis `data` alone.
        effects: What the script's ranks do once, if there is anything.

    Returns:
        The view.
    """
    view = LogicalView(world.mesh, world.notify)
    config = read_worker_config()
    view.agreement.compares_tensors = config is None or config.host_count == 1
    view.zero = None if config is None else config.zero
    OptimizerSettings(view.agreement).watch()
    stack = ExitStack()
    stack.enter_context(ShardedOptimizers(view).install())
    stack.enter_context(LogicalBackward(view).install())
    ScriptSteps(world.events, notify_if_undivided(view)).watch()
    stack.enter_context(divide_batches(view, world, effects))
    stack.enter_context(divide_draws(view))
    stack.enter_context(hide_ranks())
    if OBSERVERS:
        stack.enter_context(PlainCalls())
    atexit.register(stack.pop_all().close)
    return view


def notify_if_undivided(view: LogicalView) -> Callable[[str], None]:
    """Return a function that is called for each "step" and each "backward" pass.

    It tells the user at the second one of either kind if no function has run on divided batches until then. Not every
    script has an optimizer, and not every one calls `backward`.
    """
    counts = Counter[str]()

    def count(kind: str) -> None:
        counts[kind] += 1
        if counts[kind] == 2 and view.plans.is_empty:
            counts.update(dict.fromkeys(("step", "backward"), 2))  # which adds: neither is the second again
            view.notify(
                f"{script_line(sys._getframe(1))}: every worker computes whole batches (correct, but not faster with "
                "more workers): read the data with a DataLoader, or divide a batch with x = rankless.shard_batch(x)"
            )

    return count


class PlainCalls(TorchFunctionMode):
    """Tells the observers of calls with plain tensors alone: every rank computes them whole."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, and tell of it if its result needs gradients."""
        found = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and not TRACE_STATE.is_tracing:
            results, given = pytree.tree_leaves(found), pytree.tree_leaves((args, kwargs))
            has_gradient = any(isinstance(item, Tensor) and item.requires_grad and not item.is_leaf for item in results)
            if has_gradient and not any(isinstance(item, DividedTensor) for item in (*results, *given)):
                send_call(func, "plain", "its tensors are not divided")
        return found


class OptimizerSettings:
    """Notes the settings and the first parameters of a script's optimizers, which must be equal on all ranks.

    They come from Python, so a rank that computes them from what differs between processes would train by other
    numbers, and no gradient would show it.

    Args:
        agreement: What the ranks compare.
    """

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement
        self._noted: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()

    def watch(self) -> None:
        """Note the settings of each optimizer before it steps, until this process ends."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._compare(optimizer))

    def _compare(self, optimizer: Optimizer) -> None:
        """Compare settings that have changed since the last step, and parameters that are new."""
        name = type(optimizer).__name__
        settings = [
            [(key, value) for key, value in group.items() if type(value) in COMPARED] + [len(group["params"])]
            for group in optimizer.param_groups
        ]
        noted = self._noted.get(optimizer)
        if noted == settings:
            return
        if noted is None or [group[-1] for group in noted] != [group[-1] for group in settings]:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for number, parameter in enumerate(parameters):
                if type(parameter) in (Tensor, Parameter):
                    self._agreement.note_tensor(parameter.detach().cpu(), f"parameter {number} of {name}, with digest")
        self._noted[optimizer] = settings
        self._agreement.note(settings, f"the settings of {name}")
        self._agreement.check(f"the first step of {name} with these settings")
