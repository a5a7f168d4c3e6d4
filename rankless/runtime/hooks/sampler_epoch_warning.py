"""Warns if a script of torch.distributed forgets `sampler.set_epoch(epoch)`.

PyTorch's DistributedSampler shuffles by its seed and its epoch. Without `set_epoch` every epoch silently has the order
of the first. The hook patches `__iter__` and `set_epoch` of the class; both do and return what they did before.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data.distributed import DistributedSampler

from rankless.user_code import script_line


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
