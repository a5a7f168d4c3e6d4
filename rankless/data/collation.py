"""Collate samples with PyTorch's function or with the user's `collate_fn`.

Note [row-wise collation]: with reading="split" each rank collates only its own rows. The result is right if row i of
the batch depends on sample i alone. PyTorch's function guarantees this. `Collation` probes a user's function on its
first batches: it passes the samples in reverse order, with the first one twice, and expects the rows in the same order.
A function that sorts, mixes or normalizes over the batch, or adds lists that are not per sample, fails the probe.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert, get_worker_info

from rankless.data.batch_tree import PerSampleValues, iterate_leaves, mark_per_sample_lists
from rankless.data.generators import find_changed_generators, get_process_states, preserve_generators
from rankless.data.sample_reader import BatchRead, ReadFailure, SamplesRead

_PROBED_BATCHES = 3
_WHOLE = 'pass reading="replicated": every rank then collates the whole batch as one device does'


class Collation:
    """The `collate_fn` that the inner `DataLoader` calls with what a reader read."""

    def __init__(self, collate_fn: Callable[[Any], Any] | None) -> None:
        self.collate_fn = collate_fn
        self._probes_left = _PROBED_BATCHES

    def __call__(self, read: SamplesRead | ReadFailure) -> BatchRead | ReadFailure:
        """Return the collated batch; pass a failure through."""
        if isinstance(read, ReadFailure):
            return read
        if read.columns is not None:
            return BatchRead(data=read.columns, request=read.request)
        if read.request.rows is None:
            convert = self.collate_fn or default_convert
            return BatchRead(data=convert(read.batch), request=read.request)
        if not read.request.is_split:
            collate = self.collate_fn or default_collate
            return BatchRead(data=collate(read.samples), request=read.request)
        data = default_collate(read.samples) if self.collate_fn is None else self._collate_rows(read.samples)
        if isinstance(data, ReadFailure):
            return data
        return BatchRead(data=mark_per_sample_lists(data, len(read.samples)), request=read.request)

    def _collate_rows(self, samples: Any) -> Any:
        """Return this rank's rows from the user's function, or a failure if the function mixes rows."""
        assert self.collate_fn is not None
        probe = [*reversed(_copy_samples(samples)), *_copy_samples(samples[:1])] if self._probes_left else None
        before = get_process_states()
        data = self.collate_fn(samples)
        if find_changed_generators(before, get_process_states()):
            return _refuse("a collate_fn that draws random numbers: each rank would draw them for its own rows only")
        if probe is None:
            return data
        self._probes_left -= 1
        try:
            with preserve_generators({}):
                again = self.collate_fn(probe)
        except Exception as error:  # user code may raise anything; it succeeded with the samples in order
            return _refuse(
                f"a collate_fn that raised {type(error).__name__}: {error} on the samples in reverse plus one"
            )
        different = _find_mixed_leaf(data, again, rows=len(samples))
        if different is not None:
            return _refuse(
                f"a collate_fn whose {different} depends on the whole batch (it may sort, mix or count): with the "
                "samples in reverse, and one of them twice, its rows do not follow the samples"
            )
        return data


def _refuse(found: str) -> ReadFailure:
    failure = ReadFailure(found=found, fix=_WHOLE)
    if get_worker_info() is None:
        raise failure.as_error()
    return failure


def _copy_samples(samples: Any) -> list[Any]:
    try:
        copied: list[Any] = copy.deepcopy(samples)
    except (TypeError, RuntimeError):  # samples may hold an open file or a tensor that is part of an autograd graph
        return [copy.copy(sample) for sample in samples]
    return copied


def _find_mixed_leaf(data: Any, again: Any, *, rows: int) -> str | None:
    """Return the path of the first leaf whose rows did not follow their samples; skip leaves without rows."""
    expected, found = (
        dict(iterate_leaves(mark_per_sample_lists(data, rows))),
        dict(iterate_leaves(mark_per_sample_lists(again, rows + 1))),
    )
    for path, leaf in expected.items():
        other = found.get(path)
        if isinstance(leaf, PerSampleValues):
            same = isinstance(other, PerSampleValues) and _is_equal(
                [*reversed(leaf.values), leaf.values[0]], other.values
            )
        elif isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            same = isinstance(other, Tensor) and _is_bitwise_equal(torch.cat([leaf.flip(0), leaf[:1]]), other)
        else:
            continue
        if not same:
            return path
    return None


def _is_equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        left is right or bool(numpy.all(left == right)) for left, right in zip(one, other, strict=True)
    )


def _is_bitwise_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.numel() == 0 or one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
