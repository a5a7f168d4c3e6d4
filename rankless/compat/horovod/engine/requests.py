"""What a rank asks the negotiated operations to do, one tensor at a time."""

from dataclasses import dataclass
from enum import Enum, IntEnum

import torch

UNNAMED = "noname."
"""How the names of operations begin that the script has not named."""
GROUPED = "grouped_"
"""How the keys of a group's members begin: a group `x` and an operation `x_1of2` never collide."""


class Kind(Enum):
    """The operations. The value is the word that begins an operation's key: names of two kinds never collide."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    JOIN = "join"
    BARRIER = "barrier"
    ADD_SET = "add_process_set"
    REMOVE_SET = "remove_process_set"


class Reduction(IntEnum):
    """How values are combined; the numbers are Horovod's, and show in its error texts."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One operation on at most one tensor. Which fields matter depends on `kind`."""

    kind: Kind
    name: str = ""
    """Of the operation among those of its kind and process set; the same on all ranks."""
    tensor: torch.Tensor | None = None
    """Contiguous. ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER."""
    output: torch.Tensor | None = None
    """ALLREDUCE and BROADCAST: where the result goes, of the tensor's shape; may be the tensor itself."""
    reduction: Reduction = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """BROADCAST: a rank of the job, not a place in the process set."""
    splits: tuple[int, ...] | None = None
    """ALLTOALL: rows for each rank of the process set."""
    ranks: tuple[int, ...] = ()
    """ADD_SET: the ranks of the new process set."""
    set_id: int = 0
    """The process set; 0 is all ranks. REMOVE_SET: the one to be removed."""
    group: str = ""
    """Submissions of one group are executed together, once all of them are ready on all ranks."""
    group_size: int = 0
    may_ride: bool = True
    """Whether the values may travel with the negotiation if they are few; the same on all ranks."""

    @property
    def key(self) -> str:
        """By which ranks recognise the operation as the same."""
        return f"{GROUPED if self.group else ''}{self.kind.value}.{self.name}"


def kind_of(key: str) -> Kind:
    """The operation that a key, or a key of a group's member, stands for."""
    return Kind(key.partition(".")[0].removeprefix(GROUPED))
