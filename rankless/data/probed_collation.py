"""Collate samples with PyTorch's function or with the user's `collate_fn`.

Note [row-wise collation]: a rank that collates only its own rows is right if row i of the batch depends on sample i
alone. PyTorch's function guarantees this. A user's function is probed (Note [probed collation]). With reading="split",
which the user has chosen, `Collation` only passes the samples in reverse order, with the first one twice, and expects
the rows in the same order; a function that fails is refused.

The sizes and types of samples: they tell which batches may show that a `collate_fn` depends on the whole batch.

Note [batches that show a dependence]: a `collate_fn` that pads, sorts by length or drops samples acts on each row alone
as long as all samples of a batch are alike. A probe on such a batch proves nothing about others. `SampleSizes`
therefore asks for another probe, of a whole batch, as soon as one part of the samples has had two sizes or types, and
until a probed batch held two. If batches never do, as with buckets of one length, the ranks read whole batches.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import default_collate, default_convert, get_worker_info

from rankless.data.batch_tree import mark_per_sample_lists
from rankless.data.collation_probe import (
    CollateFunction,
    collate_and_probe,
    copy_function,
    copy_samples,
    find_function_generators,
    find_mixed_leaf,
)
from rankless.data.random_generators import find_changed_generators, get_process_states, preserve_generators
from rankless.data.sample_reader import BatchRead, Division, ProbeResult, ReadFailure, SamplesRead
from rankless.errors import DataError

_PROBED_BATCHES = 3
_WHOLE = 'pass reading="replicated": every rank then collates the whole batch as one device does'


class Collation:
    """The `collate_fn` that the inner `DataLoader` calls with what a reader read."""

    def __init__(self, collate_fn: CollateFunction | None) -> None:
        self.collate_fn = collate_fn
        self._batches = 0
        self._sizes = SampleSizes()
        self._stream_is_split: bool | None = None

    def __call__(self, read: SamplesRead | ReadFailure) -> BatchRead | ReadFailure:
        """Return the collated batch; pass a failure through."""
        if isinstance(read, ReadFailure):
            return read
        batch = self._collate(read)
        return replace(batch, common=read.common) if isinstance(batch, BatchRead) else batch

    def _collate(self, read: SamplesRead) -> BatchRead | ReadFailure:
        if read.columns is not None:
            return BatchRead(data=read.columns, request=read.request)
        if read.request.rows is None:
            convert = self.collate_fn or default_convert
            return BatchRead(data=convert(read.batch), request=read.request)
        if read.request.division is not None and self.collate_fn is not None:
            return self._collate_probed(read, read.request.division, self.collate_fn)
        if not read.request.is_split:
            collate = self.collate_fn or default_collate
            return BatchRead(data=collate(read.samples), request=read.request)
        if self.collate_fn is None:
            return BatchRead(
                data=mark_per_sample_lists(default_collate(read.samples), len(read.samples)), request=read.request
            )
        return self._collate_rows(read, self.collate_fn)

    def _collate_probed(
        self, read: SamplesRead, division: Division, function: CollateFunction
    ) -> BatchRead | ReadFailure:
        """Collate a batch of reading="auto": the whole batch with a probe, or this rank's rows of it."""
        samples = read.samples
        if read.request.is_split:
            return self._collate_own_rows(read, division, function)
        if not division.in_stream:
            return self._probe_batch(read, division, function)
        if self._stream_is_split is False:
            return BatchRead(data=function(samples), request=read.request)
        self._sizes.note(samples)
        self._batches += 1
        if self._stream_is_split is None or self._sizes.is_probe_due or self._batches.bit_count() == 1:
            batch = self._probe_batch(read, division, function)
            self._stream_is_split = batch.probe is not None and not batch.probe.reason
            return batch
        own = division.own
        request = replace(read.request, indices=read.request.indices[own], is_split=True, division=None)
        return self._collate_rows(replace(read, samples=samples[own], request=request), function)

    def _probe_batch(self, read: SamplesRead, division: Division, function: CollateFunction) -> BatchRead:
        """Collate a whole batch once, and probe the function with copies of its samples."""
        varying = self._sizes.note(read.samples)
        data, result = collate_and_probe(function, read.samples, division)
        if not result.reason:
            result = ProbeResult(reason=self._sizes.verify(varying))
        return BatchRead(data=data, request=read.request, probe=result)

    def _collate_own_rows(
        self, read: SamplesRead, division: Division, function: CollateFunction
    ) -> BatchRead | ReadFailure:
        """Collate this rank's rows. First probe the whole batch if it may show what earlier ones could not."""
        self._sizes.note(read.samples)
        if not self._sizes.is_probe_due:
            return self._collate_rows(read, function)
        assert read.read_others is not None
        own, copies = division.own, copy_samples(read.samples)
        if copies is None:
            return _refuse("samples that cannot be copied, so that the collate_fn cannot be probed")
        samples = [
            *read.read_others(slice(0, own.start)),
            *copies,
            *read.read_others(slice(own.stop, len(division.indices))),
        ]
        varying = self._sizes.note(samples)
        with preserve_generators(find_function_generators(function)):
            _, result = collate_and_probe(copy_function(function), samples, division)
        if not result.reason:
            result = ProbeResult(reason=self._sizes.verify(varying))
        if result.reason:
            return BatchRead(data=None, request=read.request, probe=result)
        return self._collate_rows(read, function)

    def _collate_rows(self, read: SamplesRead, function: CollateFunction) -> BatchRead | ReadFailure:
        """Return this rank's rows from the user's function, or a failure if the function mixes rows."""
        samples, rows = read.samples, len(read.samples)
        self._batches += 1
        # Later at powers of two, ever more rarely: a probe collates twice.
        is_probed = self._batches <= _PROBED_BATCHES or self._batches.bit_count() == 1
        probe = _reverse(samples) if is_probed else None
        before = get_process_states()
        data = function(samples)
        found = ""
        if find_changed_generators(before, get_process_states()):
            return _refuse("a collate_fn that draws random numbers: each rank would draw them for its own rows only")
        if probe is not None:
            found = _find_mixture(function, probe, data, rows)
        if not found:
            return BatchRead(data=mark_per_sample_lists(data, rows), request=read.request)
        if read.request.division is not None:
            return BatchRead(data=None, request=read.request, probe=ProbeResult(reason=f"it is a function {found}"))
        return _refuse(f"a collate_fn {found}")


def _find_mixture(function: CollateFunction, probe: list[Any], data: Any, rows: int) -> str:
    """Return how the function treats the samples in reverse order otherwise, or nothing."""
    try:
        with preserve_generators(find_function_generators(function)):
            again = copy_function(function)(probe)
    except Exception as error:  # user code may raise anything; it succeeded with the samples in order
        return f"that raised {type(error).__name__}: {error} on the samples in reverse plus one"
    different = find_mixed_leaf(data, again, rows=rows)
    if different is None:
        return ""
    return (
        f"whose {different} depends on the whole batch (it may sort, mix or count): with the samples in reverse, and "
        "one of them twice, its rows do not follow the samples"
    )


def _reverse(samples: Any) -> list[Any] | None:
    """Return copies of the samples in reverse order, with the first one twice; None if they cannot be copied."""
    copies, first = copy_samples(samples), copy_samples(samples[:1])
    return None if copies is None or first is None else [*reversed(copies), *first]


def refuse_random(reason: str) -> DataError:
    """Return the error for a `collate_fn` that begins to draw random numbers after batches were divided."""
    return ReadFailure(found=f"a collate_fn that changes after its first batch: {reason}", fix=_WHOLE).as_error()


def _refuse(found: str) -> ReadFailure:
    failure = ReadFailure(found=found, fix=_WHOLE)
    if get_worker_info() is None:
        raise failure.as_error()
    return failure


_MOST_UNIFORM_PROBES = 16
_ABSENT = ("absent",)


class SampleSizes:
    """What one reader has seen of the parts of samples."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._varying: set[str] = set()
        self._verified: set[str] = set()
        self._uniform_probes = 0

    def note(self, samples: Iterable[Any]) -> frozenset[str]:
        """Note the sizes and types of samples before they are collated. Return the parts that vary among them."""
        varying = set()
        for path, forms in _list_forms(samples, known=self._first).items():
            first = self._first.setdefault(path, next(iter(forms)))
            if forms != {first}:
                self._varying.add(path)
            if len(forms) > 1:
                varying.add(path)
        return frozenset(varying)

    @property
    def is_probe_due(self) -> bool:
        """Whether a part has had two sizes, but not yet in one probed batch."""
        return not self._varying <= self._verified

    def verify(self, varying: frozenset[str]) -> str:
        """Note that a whole batch with these varying parts passed the probe. Return why probes cannot decide, or ""."""
        self._verified |= varying
        self._uniform_probes = self._uniform_probes + 1 if self.is_probe_due else 0
        if self._uniform_probes < _MOST_UNIFORM_PROBES:
            return ""
        part = min(self._varying - self._verified)
        return (
            f"sample{part} has one size in each of {self._uniform_probes} batches, but not in all, so that no batch "
            "shows whether rows depend on it"
        )


def _list_forms(samples: Iterable[Any], *, known: Iterable[str]) -> dict[str, set[Any]]:
    """Return the sizes and types of each part of the samples, by its path. A part that a sample lacks is absent."""
    forms: dict[str, set[Any]] = defaultdict(set)
    described = [dict(_describe(sample, "")) for sample in samples]
    for path in {*known, *(path for one in described for path in one)}:
        forms[path] = {one.get(path, _ABSENT) for one in described}
    return forms


def _describe(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Yield path, and type with size, of each part of a sample. A list within a sample is one part."""
    kind = type(value).__name__
    if isinstance(value, Tensor | numpy.ndarray):
        yield path, (kind, str(value.dtype), tuple(value.shape))
    elif isinstance(value, Mapping):
        yield path, (kind, tuple(map(repr, value)))
        for key, part in value.items():
            yield from _describe(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield path, (kind, len(value))
        if isinstance(value, tuple) or not path:
            for index, part in enumerate(value):
                yield from _describe(part, f"{path}[{index}]")
        elif len({type(part) for part in value}) > 1 or not isinstance(next(iter(value), 0), int | float):
            yield f"{path}[:]", tuple(tuple(_describe(part, "")) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _describe(getattr(value, field.name), f"{path}.{field.name}")
    elif hasattr(value, "__len__"):
        yield path, (kind, len(value))
    else:
        yield path, kind
