"""Why a group of processes has become unusable, as an error."""

from dataclasses import dataclass

from rankless.errors import CollectiveError
from rankless.records.group_failure_codes import FailureKind, decode_failure


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The place of a process in a group.

    Attributes:
        rank (int): Its rank in the group.
        global_ranks (tuple[int, ...]): The ranks of the group as ranks of the job, for errors.
        timeout_seconds (float): How long the ranks wait for each other.
        timeout_name (str): What the user changes to make them wait longer, for errors.
        must_be_abortable (bool): Whether the group must not be one of Gloo, which cannot be aborted.
    """

    rank: int
    global_ranks: tuple[int, ...]
    timeout_seconds: float
    timeout_name: str = "timeout of the group"
    must_be_abortable: bool = False

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.global_ranks)


FOUND = {
    FailureKind.ABORTED: "rank {rank} aborted the group",
    FailureKind.ENDED: "the process of rank {rank} has ended",
    FailureKind.LATE: "rank {rank} did not take part within {seconds:g} s",
    FailureKind.CLOSED: "rank {rank} has closed the group",
    FailureKind.MISMATCH: "rank {rank} found that the calls of the ranks do not match",
    FailureKind.INTERRUPTED: "rank {rank} left a collective because of an exception",
    FailureKind.RUN_ENDED: "the launcher ends the run, and has ended the group",
    FailureKind.OTHER_HOST: "rank {rank} cannot go on with the ranks of other hosts",
    FailureKind.LEFT: "rank {rank} raised an exception in a call that all ranks make",
}
FIXES = {
    FailureKind.ABORTED: "see why rank {rank} aborted",
    FailureKind.ENDED: "see why rank {rank} ended",
    FailureKind.LATE: "see if rank {rank} is stopped, busy, or makes other calls; a longer {name} waits",
    FailureKind.CLOSED: "close the group only after the last collective of all ranks",
    FailureKind.MISMATCH: "make every rank call the same collectives in the same order; rank {rank} has the details",
    FailureKind.INTERRUPTED: "see the exception on rank {rank}",
    FailureKind.RUN_ENDED: "see in the launcher's report why the run ends",
    FailureKind.OTHER_HOST: "see the error of rank {rank}",
    FailureKind.LEFT: "see the exception of rank {rank}",
}


def make_mismatch_error(rank: int, other: int, *, found: str, own: str) -> CollectiveError:
    """Return the error for a rank that does not make the call of another one.

    Args:
        rank: The rank, as a rank of the job.
        other: The rank whose call it should make.
        found: What `rank` calls.
        own: What `other` calls.
    """
    return CollectiveError(
        expected=f"rank {rank} to match the call of rank {other}: {own}",
        found=f"rank {rank}: {found}",
        fix="make every rank call the same collectives in the same order, with the same lengths, dtype, reduction and "
        "root; create a new group to continue",
    )


def make_forked_error() -> CollectiveError:
    """Return the error for a call in a process that a rank of the group has forked."""
    return CollectiveError(
        expected="collectives only in the process that has joined the group",
        found="a call in a process that it has forked",
        fix="make the call in the parent process, or create a group of the new processes",
    )


def make_error(word: int, member: Membership) -> CollectiveError:
    """Return the error for a word of `encode_failure`."""
    kind, rank, seconds = decode_failure(word)
    values = {"rank": member.global_ranks[rank], "seconds": seconds}
    return CollectiveError(
        expected="every rank of the group to take part in its collectives",
        found=FOUND[kind].format(**values),
        fix=FIXES[kind].format(**values, name=member.timeout_name) + "; create a new group to continue",
    )
