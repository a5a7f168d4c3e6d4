"""The requests of a rank to the engine: one operation on at most one tensor each."""

from dataclasses import dataclass
from enum import Enum, IntEnum

import torch

from rankless.extensions.horovod.engine.messages import RequestMetadata

UNNAMED_PREFIX = "noname."
"""The start of the names of operations that the script has not named."""
GROUPED_PREFIX = "grouped_"
"""The start of the keys of a group's members: a group `x` and an operation `x_1of2` have different keys."""


class OperationKind(Enum):
    """The operations. The key of an operation starts with the value, so names of two kinds never collide."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    JOIN = "join"
    BARRIER = "barrier"
    ADD_SET = "add_process_set"
    REMOVE_SET = "remove_process_set"


class ReduceOpCode(IntEnum):
    """How values are combined. Horovod uses the same numbers, and its error texts contain them."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One operation on at most one tensor. Which fields matter depends on `kind`."""

    kind: OperationKind
    name: str = ""
    """The name among operations of the same kind and process set. It is the same on all ranks."""
    tensor: torch.Tensor | None = None
    """Contiguous. ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER."""
    output: torch.Tensor | None = None
    """ALLREDUCE and BROADCAST: receives the result. It has the tensor's shape, and may be the tensor itself."""
    reduction: ReduceOpCode = ReduceOpCode.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """BROADCAST: a rank of the job, not an index in the process set."""
    splits: tuple[int, ...] | None = None
    """ALLTOALL: rows for each rank of the process set."""
    ranks: tuple[int, ...] = ()
    """ADD_SET: the ranks of the new process set."""
    set_id: int = 0
    """The process set; 0 is all ranks. REMOVE_SET: the set to remove."""
    group: str = ""
    """Requests of one group are executed together, once all of them are ready on all ranks."""
    group_size: int = 0
    allow_inline: bool = True
    """Whether a small tensor's values may be sent with the request. It is the same on all ranks."""

    @property
    def key(self) -> str:
        """The string by which ranks recognize the same operation."""
        return f"{GROUPED_PREFIX if self.group else ''}{self.kind.value}.{self.name}"


def parse_operation_kind(key: str) -> OperationKind:
    """Return the kind of operation from its key, which may be that of a group's member."""
    return OperationKind(key.partition(".")[0].removeprefix(GROUPED_PREFIX))


def make_metadata(request: EngineRequest, key: str, is_inline: bool) -> RequestMetadata:
    """Return the request as the coordinator receives it. `key` is unique among those of the process set."""
    tensor = request.tensor
    return RequestMetadata(
        kind=request.kind.value,
        key=key,
        set_id=0 if request.kind is OperationKind.REMOVE_SET else request.set_id,
        dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        shape=() if tensor is None else tuple(tensor.shape),
        device="cpu" if tensor is None else tensor.device.type,
        reduction=int(request.reduction),
        prescale=request.prescale,
        postscale=request.postscale,
        root=request.set_id if request.kind is OperationKind.REMOVE_SET else request.root,
        splits=request.splits or (),
        ranks=request.ranks,
        group=request.group,
        group_size=request.group_size,
        is_inline=is_inline,
    )
