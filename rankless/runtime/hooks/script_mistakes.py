"""Warns about mistakes of scripts that each rank makes alike, so one rank's warning is enough.

A script of torch.distributed may forget `sampler.set_epoch(epoch)`. PyTorch's DistributedSampler shuffles by its seed
and its epoch, so every epoch then silently has the order of the first. The hook patches `__iter__` and `set_epoch` of
the class; both do and return what they did before.

A script may start a whole training of its own in each worker with `torch.multiprocessing.spawn`.

A script without a job, a process group or an extension's API runs once per worker, and each copy trains alone. The hook
looks at the second step of an optimizer and then does nothing, so later steps cost nothing.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.distributed import DistributedSampler

from rankless.config.extensions import list_aliases
from rankless.user_code import script_line

CONNECTING_MODULES = ("mpi4py", "ray")
"""Modules by which a script may connect its processes without torch.distributed, beside those of extensions."""


def warn_of_mistakes(notify: Callable[[str], None], *, world_size: int) -> None:
    """Observe this process, one of `world_size` workers, from now on, and call `notify` once for each mistake."""
    warn_on_missing_set_epoch(notify)
    if world_size > 1:  # a lone worker may start processes, and trains no model twice
        warn_on_nested_spawn(notify, world_size=world_size)
        warn_on_separate_training(notify, world_size=world_size)


def warn_on_missing_set_epoch(notify: Callable[[str], None]) -> None:
    """Observe every DistributedSampler of this process from now on, and call `notify` at most once."""
    monitor = SamplerEpochMonitor(notify)
    iterate, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch

    @functools.wraps(iterate)
    def observed_iter(self: DistributedSampler[Any]) -> Iterator[Any]:
        samples = iterate(self)
        monitor.on_pass_start(self, samples)
        return samples

    @functools.wraps(set_epoch)
    def observed_set_epoch(self: DistributedSampler[Any], epoch: int) -> None:
        monitor.on_set_epoch(self)
        set_epoch(self, epoch)

    DistributedSampler.__iter__ = observed_iter  # type: ignore[method-assign]  # this is the patch
    DistributedSampler.set_epoch = observed_set_epoch  # type: ignore[method-assign]


class SamplerEpochMonitor:
    """Knows each sampler's last pass, and for which samplers the script has called `set_epoch`."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify: Callable[[str], None] | None = notify
        self._with_epoch: WeakSet[DistributedSampler[Any]] = WeakSet()
        self._last: WeakKeyDictionary[DistributedSampler[Any], tuple[int, Iterator[Any]]] = WeakKeyDictionary()

    def on_set_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Note that the script calls `set_epoch`: from now on it repeats an epoch on purpose."""
        with contextlib.suppress(TypeError):  # a subclass may be unhashable
            self._with_epoch.add(sampler)

    def on_pass_start(self, sampler: DistributedSampler[Any], samples: Iterator[Any]) -> None:
        """Warn if the pass that yields `samples` has the order of the last pass, which has ended."""
        # Without gradients it is an evaluation, where order does not matter.
        if self._notify is None or not sampler.shuffle or not torch.is_grad_enabled():
            return
        with contextlib.suppress(TypeError):
            epoch, last = self._last.get(sampler, (None, samples))
            if epoch == sampler.epoch and sampler not in self._with_epoch and operator.length_hint(last, 1) == 0:
                notify, self._notify = self._notify, None
                line = script_line(sys._getframe(1))
                notify(
                    f"{line}: every epoch has the same order, because sampler.set_epoch(epoch) is missing before this "
                    "loop (if order does not matter, pass shuffle=False)"
                )
            self._last[sampler] = (sampler.epoch, samples)


def warn_on_nested_spawn(notify: Callable[[str], None], *, world_size: int) -> None:
    """Patch `torch.multiprocessing.spawn`: the first call in one of `world_size` workers warns, then spawns."""
    multiprocessing: Any = torch.multiprocessing
    spawn = multiprocessing.spawn

    @functools.wraps(spawn)
    def observed_spawn(*arguments: Any, **keywords: Any) -> Any:
        multiprocessing.spawn = spawn
        line = script_line(sys._getframe(1))
        notify(
            f"{line}: the script starts processes itself, and each of the {world_size} workers does so; "
            "start such a script with `python` or with `rankless run -n 1`"
        )
        return spawn(*arguments, **keywords)

    multiprocessing.spawn = observed_spawn


def warn_on_separate_training(notify: Callable[[str], None], *, world_size: int) -> None:
    """Observe the optimizers of this process, one of `world_size` workers, and call `notify` at most once."""
    steps = 0

    def on_step(*_arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != 2:  # the hook stays: PyTorch is going through all hooks, of which none may be removed now
            return
        frame = sys._getframe(1)
        if is_alone_with_accelerate(frame):
            reason = "Accelerate uses one process here; to train on CPUs together pass Accelerator(cpu=True)"
        elif not is_connected():
            reason = (
                "the script has no job and no process group; make the training step a @rankless.job, or use "
                "DistributedDataParallel"
            )
        else:
            return
        notify(
            f"{script_line(frame)}: each of the {world_size} workers trains a model of its own: {reason}. For one "
            "training use `rankless run --logical`, which divides its batches, or start it with -n 1"
        )

    register_optimizer_step_post_hook(on_step)


def is_connected() -> bool:
    """Return whether this process has joined others, or has loaded a library that does."""
    names = {*CONNECTING_MODULES, *(each for name, alias in list_aliases().items() for each in (name, alias.target))}
    joined = sys.modules.get("rankless.runtime.current_context")
    if joined is not None and joined.join_line() is not None:
        return True
    return (dist.is_available() and dist.is_initialized()) or any(name in sys.modules for name in names)


def is_alone_with_accelerate(frame: FrameType | None) -> bool:
    """Return whether Accelerate makes this step, and takes the process for the only one.

    Accelerate makes a process group even then. Without a GPU it connects processes only if the script asks for CPUs.
    """
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.PartialState._shared_state
    if shared.get("num_processes", 1 if shared else None) != 1:
        return False
    while frame is not None and frame.f_globals.get("__name__") != "accelerate.optimizer":
        frame = frame.f_back
    return frame is not None
