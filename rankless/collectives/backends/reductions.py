"""The reductions of collectives: which dtypes each takes, and the combination of all ranks' values in rank order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from rankless.errors import CallError

BLOCK_BYTES = 256 << 10
"""So much is combined at a time, because intermediate results then stay in the processor's cache."""

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[Any, Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_REDUCTIONS = tuple(_COMBINE)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_DTYPES = (*_FLOATS, *_WHOLE)


class Reduction:
    """A reduction of values of one dtype.

    Args:
        operation: A `torch.distributed.ReduceOp`: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        dtype: The dtype of the values: float16, bfloat16, float32, float64, a signed integer, uint8 or bool.

    Raises:
        CallError: The reduction does not take the dtype: AVG takes floats, the bitwise ones integers and bool.
    """

    def __init__(self, operation: Any, dtype: torch.dtype) -> None:
        kind = getattr(operation, "op", operation)
        if kind not in _COMBINE or dtype not in _DTYPES:
            raise _refuse(kind, dtype)
        if kind == ReduceOp.AVG and dtype not in _FLOATS:
            raise _refuse(kind, dtype)
        if kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and dtype in _FLOATS:
            raise _refuse(kind, dtype)
        self.number = _REDUCTIONS.index(kind)
        self.is_average = kind == ReduceOp.AVG
        self._combine = _COMBINE[kind]
        self._scratch: torch.Tensor | None = None
        self._block = BLOCK_BYTES // dtype.itemsize
        self._dtype = dtype

    def reduce(self, sources: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Combine the values of all ranks, in the order of `sources`.

        Args:
            sources: The values of each rank, flat tensors of one length.
            output: Where to put the result. It may be one of the sources.
        """
        if len(sources) == 1:
            output.copy_(sources[0])
        elif len(sources) == 2 and not self.is_average:
            self._combine(sources[0], sources[1], out=output)
        elif output.numel() <= self._block:
            self._reduce_block(sources, output)
        else:
            for start in range(0, output.numel(), self._block):
                end = start + self._block
                self._reduce_block([source[start:end] for source in sources], output[start:end])

    def _reduce_block(self, sources: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        if len(sources) == 2:
            self._combine(sources[0], sources[1], out=output)
            output.div_(2)
            return
        if self._scratch is None:
            with torch.inference_mode(False):
                self._scratch = torch.empty(self._block, dtype=self._dtype, device="cpu")
        total = self._scratch[: output.numel()]
        self._combine(sources[0], sources[1], out=total)
        for source in sources[2:-1]:
            self._combine(total, source, out=total)
        self._combine(total, sources[-1], out=output)
        if self.is_average:
            output.div_(len(sources))


def find_reduced_dtype(dtype: torch.dtype, operation: Any) -> torch.dtype:
    """Return the dtype in which values are reduced: for SUM and AVG of complex ones that of their parts.

    Raises:
        CallError: Another reduction of complex values.
    """
    kind = getattr(operation, "op", operation)
    if dtype in _COMPLEX and kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise _refuse(kind, dtype)
    return _COMPLEX.get(dtype, dtype)


def view_as_reduced(flat: torch.Tensor) -> torch.Tensor:
    """Return flat values in the same memory, complex ones as pairs of their parts."""
    return flat.view(_COMPLEX[flat.dtype]) if flat.dtype in _COMPLEX else flat


def describe_reduction(number: int) -> str:
    """Return the name of the reduction with this `Reduction.number`."""
    return str(_REDUCTIONS[number].name) if number < len(_REDUCTIONS) else "unknown"


def _refuse(kind: Any, dtype: torch.dtype) -> CallError:
    return CallError(
        expected="a reduction that takes the dtype of the tensor: AVG floats, BAND, BOR and BXOR integers and bool, "
        "complex values only SUM and AVG",
        found=f"{getattr(kind, 'name', kind)} of {dtype}",
        fix="choose another reduction, or convert the tensor",
    )
