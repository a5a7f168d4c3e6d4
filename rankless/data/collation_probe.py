"""Probe whether row i of a `collate_fn`'s batch comes from sample i alone, so that ranks can collate their own samples.

Note [probed collation]: with reading="auto" all ranks read the first batch whole, and collate it once, as one device
does. Copies of its samples then go through the `collate_fn` in parts: the ranks' parts, single samples, and the samples
in reverse order with the first one twice. The rows must be the whole batch's, bit for bit. Otherwise, or if the
`collate_fn` draws random numbers, every rank goes on reading whole batches, with each sample's own random numbers as in
"split". What was read for the probe is the batch that the loader yields, so nothing is read or drawn twice. Reader
processes that read ahead read whole batches until the ranks have decided.

Later batches may show what the first one could not. `SampleSizes` names the batches to probe again. If such a probe
fails, the ranks drop what they have read ahead, and read those batches again, whole. Each sample has its own seed, so
it is the same sample. If a `collate_fn` begins to draw random numbers after its first batch, reader processes cannot
draw them again, and it is refused.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor

from rankless.collectives.value_encoding import encode_value, view_bytes
from rankless.data.batch_tree import PerSampleValues, iterate_leaves, mark_per_sample_lists
from rankless.data.random_generators import (
    Generator,
    find_changed_generators,
    find_generators,
    get_process_states,
    get_states,
    preserve_generators,
)
from rankless.data.sample_reader import Division, ProbeResult
from rankless.parallel.tensor_placement import split_lengths
from rankless.user_code import display_name, is_user_code

_MOST_PARTS = 32
"""How many single samples, or runs of samples, are collated alone."""

CollateFunction = Callable[[Any], Any]


def collate_and_probe(function: CollateFunction, samples: Any, division: Division) -> tuple[Any, ProbeResult]:
    """Collate a whole batch as one device does. Return it with what the probe found."""
    copies, probed = copy_samples(samples), copy_function(function)
    generators = find_function_generators(function)
    before, before_own = get_process_states(), copy.deepcopy(get_states(generators))
    data = function(samples)
    drawn = find_changed_generators(before, get_process_states())
    if drawn or not _has_states(generators, before_own):
        names = " and ".join(sorted(drawn)) or "a generator of its own"
        return data, ProbeResult(reason=f"it draws random numbers from {names}", is_random=True)
    if copies is None:
        return data, ProbeResult(reason="the samples cannot be copied, so it cannot be probed")
    with preserve_generators(generators):
        return data, explain_dependence(probed, copies, data, division)


def explain_dependence(function: CollateFunction, samples: list[Any], whole: Any, division: Division) -> ProbeResult:
    """Return why rows of the batch `whole` do not follow from their samples alone; `samples` are copies of these."""
    rows = len(samples)
    leaves = _list_leaves(whole, rows)
    for path, leaf in leaves.items():
        if found := _explain_leaf(path, leaf, rows):
            return ProbeResult(reason=found)
    before = get_process_states()
    try:
        for name, part in _iterate_parts(division, rows):
            if found := _compare_part(leaves, function(copy_samples(samples[part])), part, name):
                return ProbeResult(reason=found)
        again = function([*reversed(copy_samples(samples) or ()), *(copy_samples(samples[:1]) or ())])
    except Exception as error:  # user code may raise anything; it succeeded with the whole batch
        return ProbeResult(reason=f"it raises {type(error).__name__}: {error}, if it gets only a part of the batch")
    if find_changed_generators(before, get_process_states()):
        return ProbeResult(reason="it draws random numbers for some batches", is_random=True)
    mixed = find_mixed_leaf(whole, again, rows=rows)
    return ProbeResult(reason="" if mixed is None else f"{mixed} depends on the order of the samples")


def find_mixed_leaf(data: Any, again: Any, *, rows: int) -> str | None:
    """Return the path of the first leaf whose rows did not follow their samples; skip leaves without rows."""
    expected, found = _list_leaves(data, rows), _list_leaves(again, rows + 1)
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


def copy_samples(samples: Any) -> list[Any] | None:
    """Return copies of samples that a `collate_fn` may change, or None if they cannot be copied."""
    try:
        copied: list[Any] = copy.deepcopy(samples)
    except (TypeError, RuntimeError):  # samples may hold an open file or a tensor that is part of an autograd graph
        try:
            return [copy.copy(sample) for sample in samples]
        except TypeError:
            return None
    return copied


def describe_function(function: CollateFunction) -> str:
    """Return a function's name and line, like "pad (train.py:12)"."""
    plain = function.func if isinstance(function, functools.partial) else function
    code = getattr(plain, "__code__", None) or getattr(_get_call(plain), "__code__", None)
    name = getattr(plain, "__name__", type(plain).__name__)
    return name if code is None else f"{name} ({display_name(code.co_filename)}:{code.co_firstlineno})"


def find_function_generators(function: CollateFunction) -> dict[str, Generator]:
    """Return the generators that a function reaches through its object, closure, arguments and global names."""
    owners: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                visit(part)
        elif isinstance(value, MethodType):
            visit(value.__self__)
            visit(value.__func__)
        elif isinstance(value, FunctionType):
            if is_user_code(value.__code__.co_filename):
                for part in _list_reached(value):
                    visit(part)
        elif not isinstance(value, type | BuiltinFunctionType):
            owners.append(value)
            if (call := _get_call(value)) is not None:
                visit(call)

    visit(function)
    found: dict[str, Generator] = {}
    for number, owner in enumerate(owners):
        found |= {f"{number} {path}": generator for path, generator in find_generators(owner).items()}
    return found


def _get_call(value: Any) -> FunctionType | None:
    """Return the Python function that runs when an object is called, or None."""
    found = (vars(kind).get("__call__") for kind in type(value).__mro__)
    return next((call for call in found if isinstance(call, FunctionType)), None)


def _list_reached(function: FunctionType) -> Iterator[Any]:
    """Yield what a function reads: closure, defaults, and global values by name."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the name has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def copy_function(function: CollateFunction) -> CollateFunction:
    """Return a copy of a callable object, so that the probe does not change its state; functions stay themselves."""
    try:
        copied: CollateFunction = copy.deepcopy(function)
    except Exception:  # copying foreign objects may raise anything; the probe then calls the object itself
        return function
    return copied


def _has_states(generators: dict[str, Generator], states: dict[str, Any]) -> bool:
    return repr(get_states(generators)) == repr(states) and all(
        not isinstance(state, Tensor) or torch.equal(state, states[name])
        for name, state in get_states(generators).items()
    )


def _iterate_parts(division: Division, rows: int) -> Iterator[tuple[str, slice]]:
    """Yield the parts to collate alone, each with its name."""
    start = 0
    for rank, length in enumerate(division.lengths):
        yield f"rank {rank}'s part", slice(start, start + length)
        start += length
    start = 0
    for length in split_lengths(rows, min(rows, _MOST_PARTS)):
        name = f"sample {start} alone" if length == 1 else f"samples {start} to {start + length - 1}"
        yield name, slice(start, start + length)
        start += length


def _list_leaves(data: Any, rows: int) -> dict[str, Any]:
    return dict(iterate_leaves(mark_per_sample_lists(data, rows)))


def _explain_leaf(path: str, leaf: Any, rows: int) -> str:
    """Return why a leaf of the whole batch cannot be divided, or nothing."""
    if isinstance(leaf, PerSampleValues):
        try:
            encode_value(list(leaf.values))
        except TypeError as error:
            return f"{path} is a list of values that ranks cannot exchange: {error}"
        return ""
    if leaf is None:
        return ""
    if not isinstance(leaf, Tensor):
        return f"{path} is one {type(leaf).__name__} for the whole batch: {leaf!r:.40}"
    if leaf.layout is not torch.strided or leaf.is_nested:
        return f"{path} is a tensor of layout {leaf.layout}"
    if leaf.dim() == 0 or leaf.shape[0] != rows:
        return f"{path} has shape {list(leaf.shape)} for {rows} samples"
    return ""


def _compare_part(leaves: dict[str, Any], data: Any, part: slice, name: str) -> str:
    """Return how a part's collation differs from its rows of the whole batch, or nothing."""
    found = _list_leaves(data, part.stop - part.start)
    if found.keys() != leaves.keys():
        return f"{min(found.keys() ^ leaves.keys())} is not in the whole batch and in {name}"
    for path, leaf in leaves.items():
        other = found[path]
        if isinstance(leaf, PerSampleValues):
            if not isinstance(other, PerSampleValues) or not _is_equal(list(leaf.values[part]), list(other.values)):
                return f"{path} has other values for the whole batch than for {name}"
        elif leaf is None or not isinstance(other, Tensor):
            if leaf is not other:
                return f"{path} is a {type(leaf).__name__} for the whole batch, a {type(other).__name__} for {name}"
        elif difference := _compare_rows(leaf, other, part):
            return f"{path} has {difference} for {name}"
    return ""


def _compare_rows(leaf: Tensor, other: Tensor, part: slice) -> str:
    if other.dim() == 0 or leaf.shape[1:] != other.shape[1:] or other.shape[0] != part.stop - part.start:
        return f"shape {list(leaf.shape)} for the whole batch, {list(other.shape)}"
    if leaf.dtype != other.dtype or type(leaf) is not type(other):
        return (
            f"type {type(leaf).__name__} of {leaf.dtype} for the whole batch, {type(other).__name__} of {other.dtype}"
        )
    return "" if _is_bitwise_equal(leaf[part], other) else "other values for the whole batch than"


def _is_equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        left is right or (type(left) is type(right) and bool(numpy.all(left == right)))
        for left, right in zip(one, other, strict=True)
    )


def _is_bitwise_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.numel() == 0 or view_bytes(one).equal(view_bytes(other))
