"""Compare an operator that a probe divided with the whole batch, on the rows that a program really gets.

Note [checks of probed operators]: sample data cannot show everything. So at the first call of a program, and 1, 2, 4,
8, … calls later, the ranks gather the arguments of such an operator, and each compares its rows of the whole result.
They do so together or not at all, because the number of the call is one for all. If a rank's rows differ, all ranks
raise, before anything of the call has changed. The cost is one gather, and one whole run of the operator on each
rank, each time that the number of calls has doubled.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.capture.trace_errors import WHOLE_BATCH
from rankless.compiler.probing.row_independence import (
    Dims,
    Function,
    is_close,
    list_results,
    same_bits,
)
from rankless.errors import StepError
from rankless.parallel.mesh import MeshAxis

ROUNDINGS = 64.0
"""How many times further they may lie apart if the operator does not repeat its own result, as sums of GPUs may."""


class CallNumber:
    """The number of a job's present call, which is the same on all ranks."""

    def __init__(self) -> None:
        self.value = 0


@dataclass
class RowCheck:
    """What the ranks compare of one operator that a probe divided.

    Args:
        operator: The operator.
        line: The line of the script.
        lengths: The number of rows of each rank.
        inputs: For each argument, lists flattened, the dim along which ranks divide it; None for all others.
        outputs: The same for each result.
        calls: Counts the calls.
    """

    operator: Callable[..., Any]
    line: str
    lengths: tuple[int, ...]
    inputs: Dims
    outputs: Dims
    calls: CallNumber
    first: int = field(init=False)
    """The call for which the program was made."""
    _seen: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    """Arguments and results of ranks that run in this process one after the other, as microbatches do."""
    _seen_at: int = -1

    def __post_init__(self) -> None:
        self.first = self.calls.value

    def is_due(self) -> bool:
        """Return whether the ranks compare at this call: the first, and the second, fourth, eighth, … after it."""
        count = max(0, self.calls.value - self.first)
        return count & (count - 1) == 0

    def compare(self, axis: MeshAxis, args: Any, kwargs: Any, result: Any) -> None:
        """Raise `StepError` on all ranks along an axis if the rows of one of them depend on those of others."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = list_results(result)
        if axis.group is None:
            self._collect(axis.rank, leaves, found, spec)
            return
        whole = [
            item if dim is None else all_gather(item.contiguous(), among=axis, dim=dim, lengths=self.lengths)
            for item, dim in zip(leaves, self.inputs, strict=True)
        ]
        coupled = self._find(axis.rank, whole, found, spec)
        own = torch.tensor([[1.0, *coupled] if coupled else [0.0] * 4], device=axis_device(leaves))
        for is_found, *where in all_gather(own, among=axis, dim=0, lengths=(1,) * axis.size).tolist():
            if is_found:
                raise self._make_error(*where)

    def _collect(self, rank: int, leaves: list[Any], found: list[Any], spec: pytree.TreeSpec) -> None:
        """Compare once all ranks have run that share this process."""
        if self._seen_at != self.calls.value or rank in self._seen:
            self._seen, self._seen_at = {}, self.calls.value
        self._seen[rank] = leaves, found
        if len(self._seen) < len(self.lengths):
            return
        seen, self._seen = [self._seen[number] for number in range(len(self.lengths))], {}
        whole = [
            item if dim is None else torch.cat([given[place] for given, _ in seen], dim)
            for place, (item, dim) in enumerate(zip(leaves, self.inputs, strict=True))
        ]
        for number, (_, results) in enumerate(seen):
            if coupled := self._find(number, whole, results, spec):
                raise self._make_error(*coupled)

    def _find(
        self, rank: int, whole: Sequence[Any], found: Sequence[Any], spec: pytree.TreeSpec
    ) -> tuple[int, float, float] | None:
        """Return a row of a rank that depends on rows of other ranks, and its two values."""

        def run(tensors: Sequence[Tensor]) -> Any:
            args, kwargs = pytree.tree_unflatten(list(tensors), spec)
            return self.operator(*args, **kwargs)

        start = sum(self.lengths[:rank])
        return find_coupled_row(run, whole, (*self.inputs, *self.outputs), (start, self.lengths[rank]), found)

    def _make_error(self, row: float, own: float, whole: float) -> StepError:
        return StepError(
            expected=f"each row of {self.operator} to depend on no other row, as on the sample data of a probe",
            found=f"row {row:.0f} of this batch gives {own:.6g} among the rows of its rank, and {whole:.6g} in the "
            "whole batch",
            fix=f"write the operator with PyTorch's operators, {WHOLE_BATCH}",
            where=self.line or None,
        )


@dataclass(frozen=True, eq=False)
class CheckedOperator:
    """An operator that a probe divided, in the program of one rank."""

    check: RowCheck
    axis: MeshAxis

    @property
    def __name__(self) -> str:
        return str(self.check.operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on this rank's rows, and compare them with the whole batch if that is due."""
        result = self.check.operator(*args, **kwargs)
        if self.check.is_due():
            self.check.compare(self.axis, args, kwargs, result)
        return result


def axis_device(leaves: Sequence[Any]) -> torch.device:
    """Return the device of the tensors among these arguments."""
    return next(item.device for item in leaves if isinstance(item, Tensor))


def find_coupled_row(
    function: Function, whole: Sequence[Tensor], dims: Dims, own: tuple[int, int], found: Sequence[Tensor | None]
) -> tuple[int, float, float] | None:
    """Return a row whose result is another one on real data in the whole batch; None if there is none.

    Kernels round differently for other numbers of rows, which may tip an integer over. So a difference counts only if
    the rank's rows of the whole result change with the rows of other ranks, to the bit.

    Args:
        function: The operator, as for `find_output_dims`.
        whole: Its tensors, with the rows of all ranks.
        dims: The dim of each tensor along which ranks divide it, and after these that of each result.
        own: The first of this rank's rows, and their number.
        found: The results of this rank's rows.

    Returns:
        The row, its value among the rank's rows, and that in the whole batch.
    """
    inputs, outputs = dims[: len(whole)], dims[len(whole) :]
    first = _run_own_rows(function, whole, outputs, own)
    pairs = [] if first is None else list(zip(found, first, outputs, strict=True))
    different = [(one, other, dim) for one, other, dim in pairs if not is_same_part(one, other)]
    if first is None or not different:
        return None
    again = _run_own_rows(function, whole, outputs, own)
    if again is None or not all(map(same_bits, first, again)):  # its sums have no order
        different = [(one, other, dim) for one, other, dim in different if not is_same_part(one, other, ROUNDINGS)]
    elif not any(
        changed is not None and not all(map(same_bits, first, changed))
        for changed in (
            _run_own_rows(function, replaced, outputs, own) for replaced in _replace_others(whole, inputs, own)
        )
    ):
        return None
    return next((locate(one, other, dim, own[0]) for one, other, dim in different), None)


def _run_own_rows(
    function: Function, inputs: Sequence[Tensor], outputs: Dims, own: tuple[int, int]
) -> list[Tensor | None] | None:
    """Return a rank's rows of an operator's results; None if it fails on whole tensors."""
    try:
        found = list_results(function(inputs))
        return [
            item if item is None or dim is None else item.narrow(dim, *own)
            for item, dim in zip(found, outputs, strict=True)
        ]
    except Exception:
        return None


def _replace_others(whole: Sequence[Tensor], dims: Dims, own: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Yield tensors in which the rows of other ranks are zeros, ones, and copies of this rank's first row."""
    start, length = own
    for make in (torch.zeros_like, torch.ones_like, lambda row: row):
        replaced = []
        for item, dim in zip(whole, dims, strict=True):
            if dim is not None:
                kept = item.narrow(dim, start, length)
                item = make(item.narrow(dim, start, 1)).expand_as(item).clone()
                item.narrow(dim, start, length).copy_(kept)
            replaced.append(item)
        yield replaced


def is_same_part(one: Tensor | None, other: Tensor | None, roundings: float = 1.0) -> bool:
    """Return whether a rank's result is the part of the whole one, up to the rounding of its dtype."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return is_close(one, other, roundings)


def locate(one: Tensor | None, other: Tensor | None, dim: int | None, start: int) -> tuple[int, float, float]:
    """Return the row of a batch in which two results differ most, and the two values there."""
    if one is None or other is None or dim is None or one.shape != other.shape:
        return start, math.nan, math.nan
    pair = [item.movedim(dim, 0).reshape(item.shape[dim], -1) for item in (one, other)]
    real = [(item.abs() if item.is_complex() else item).double().nan_to_num() for item in pair]
    place = int((real[0] - real[1]).abs().argmax())
    row, column = divmod(place, real[0].shape[1])
    return start + row, float(real[0][row, column]), float(real[1][row, column])
