"""The sizes and types of samples: they tell which batches may show that a `collate_fn` depends on the whole batch.

Note [batches that show a dependence]: a `collate_fn` that pads, sorts by length or drops samples acts on each row alone
as long as all samples of a batch are alike. A probe on such a batch proves nothing about others. `SampleSizes`
therefore asks for another probe, of a whole batch, as soon as one part of the samples has had two sizes or types, and
until a probed batch held two. If batches never do, as with buckets of one length, the ranks read whole batches.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
from torch import Tensor

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
