"""How values are combined: the constants, and the rule of one allreduce or reducescatter."""

import warnings
from dataclasses import dataclass

from rankless.extensions.horovod.common.process_sets import ProcessSet
from rankless.extensions.horovod.common.util import num_rank_is_power_2
from rankless.extensions.horovod.engine.requests import ReduceOpCode

Average = ReduceOpCode.AVERAGE
Sum = ReduceOpCode.SUM
Adasum = ReduceOpCode.ADASUM
Min = ReduceOpCode.MIN
Max = ReduceOpCode.MAX
Product = ReduceOpCode.PRODUCT


@dataclass(frozen=True)
class ReductionRule:
    """How values are combined, and among which ranks."""

    reduction: ReduceOpCode
    prescale: float
    postscale: float
    process_set: ProcessSet

    @property
    def fields(self) -> dict[str, float]:
        """The fields of an `EngineRequest`."""
        return {"reduction": self.reduction, "prescale": self.prescale, "postscale": self.postscale}


def make_reduction_rule(
    op: int, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> ReductionRule:
    """Return the rule of one call. Raises ValueError for an unknown op, NotImplementedError for unsupported Adasum."""
    reduction = ReduceOpCode(op)
    if reduction is ReduceOpCode.ADASUM:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if not num_rank_is_power_2(process_set.size() or 0):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    return ReductionRule(reduction, float(prescale_factor), float(postscale_factor), process_set)


def resolve_reduction(op: int | None, average: bool | None) -> int:
    """Return the op of a call. `average=` is its older form, and Average the default."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is None:
        return Average if op is None else op
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return Average if average else Sum
