"""Noticing that a script of torch.distributed forgets `sampler.set_epoch(epoch)`.

PyTorch's DistributedSampler shuffles by its seed and its epoch, so without `set_epoch` every epoch has the order of the
first, and nothing says so. Watched are `__iter__` and `set_epoch` of the class itself; what they do and return stays.
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


def watch_samplers(notify: Callable[[str], None]) -> None:
    """Watch every DistributedSampler of this process from now on; `say` is called once, if at all."""
    watch = SamplerEpochMonitor(notify)
    begin, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch

    @functools.wraps(begin)
    def watched_begin(self: DistributedSampler[Any]) -> Iterator[Any]:
        samples = begin(self)
        watch.begins(self, samples)
        return samples

    @functools.wraps(set_epoch)
    def watched_set_epoch(self: DistributedSampler[Any], epoch: int) -> None:
        watch.is_told_epoch(self)
        set_epoch(self, epoch)

    DistributedSampler.__iter__ = watched_begin  # type: ignore[method-assign]  # that is the watching
    DistributedSampler.set_epoch = watched_set_epoch  # type: ignore[method-assign]


class SamplerEpochMonitor:
    """Each sampler's last pass, and which samplers have been told an epoch."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify: Callable[[str], None] | None = notify
        self._told: WeakSet[DistributedSampler[Any]] = WeakSet()
        self._last: WeakKeyDictionary[DistributedSampler[Any], tuple[int, Iterator[Any]]] = WeakKeyDictionary()

    def is_told_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Note that the script calls `set_epoch`: passes of one epoch are its will from now on."""
        with contextlib.suppress(TypeError):  # a subclass may be unhashable, which is no fault
            self._told.add(sampler)

    def begins(self, sampler: DistributedSampler[Any], samples: Iterator[Any]) -> None:
        """Say so if a pass that takes `samples` begins just as the last one did, which has come to its end."""
        # Without gradients it is an evaluation, where order does not matter.
        if self._notify is None or not sampler.shuffle or not torch.is_grad_enabled():
            return
        with contextlib.suppress(TypeError):
            epoch, last = self._last.get(sampler, (None, samples))
            if epoch == sampler.epoch and sampler not in self._told and operator.length_hint(last, 1) == 0:
                notify, self._notify = self._notify, None
                line = script_line(sys._getframe(1))
                notify(
                    f"{line}: every epoch has the same order, because sampler.set_epoch(epoch) is missing before this "
                    "loop (where order does not matter, say shuffle=False)"
                )
            self._last[sampler] = (sampler.epoch, samples)
