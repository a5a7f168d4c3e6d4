"""A worker of an elastic job as the roll knows it, and what the roll wants done with one."""

from dataclasses import dataclass
from enum import Enum

from rankless.launch.elastic.rank_assignment import Member
from rankless.records.elastic_messages import DriverMessage


class Status(Enum):
    """Where a worker is."""

    STARTING = "starting"
    READY = "ready"
    IN_ROUND = "in a round"
    DISMISSED = "dismissed"


@dataclass(kw_only=True, eq=False)
class ElasticWorker:
    """One living worker."""

    number: int
    host: str
    slot: int
    """The lowest number that no other living worker of its host had when it was started."""
    status: Status = Status.STARTING
    synced_round: int = 0
    last_round: int = 0
    last_rank: int = -1
    has_state: bool = False
    ready_since: float = 0.0
    owes_since: float = float("inf")
    """Since when it should have come to the next round, or have ended."""
    is_to_end: bool = False
    is_wanted: bool = True
    keeps_state: bool = False
    """There is no slot for it any more, but nobody else who has the state."""

    @property
    def member(self) -> Member:
        """What counts of it for its rank."""
        return Member(
            number=self.number,
            host=self.host,
            synced_round=self.synced_round,
            last_round=self.last_round,
            last_rank=self.last_rank,
        )

    @property
    def may_join(self) -> bool:
        """Whether it may be in the next round."""
        return self.is_wanted or self.keeps_state


@dataclass(frozen=True)
class Start:
    """A worker is to be started."""

    worker: ElasticWorker


@dataclass(frozen=True)
class Tell:
    """A worker is to be told something."""

    worker: ElasticWorker
    word: DriverMessage


@dataclass(frozen=True)
class End:
    """A worker is to be ended, unless it computes."""

    worker: ElasticWorker
    why: str
    """As "did not come to hvd.init for 30 s"."""


Action = Start | Tell | End
