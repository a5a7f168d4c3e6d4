"""Finds ranks that wait for each other in different operations, so that none of them can go on."""

from collections.abc import Mapping, Sequence

from rankless.collectives.call_signature import format_ranks
from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.coordinator_table import SubmittedOperation

Waits = Mapping[int, Sequence[tuple[SubmittedOperation, Sequence[int]]]]
"""By waiting rank: the operations that it waits for, each with the ranks that have not submitted it."""
MAX_LISTED = 8
"""How many operations an error text lists."""


def find_deadlock(waits: Waits) -> dict[int, list[tuple[SubmittedOperation, Sequence[int]]]]:
    """Return the waits that cannot end: each is for a rank that waits without end itself.

    A rank that waits for several operations waits until all have ended.
    """
    stuck = set(waits)
    while True:
        found = {
            rank: [(one, missing) for one, missing in waits[rank] if not stuck.isdisjoint(missing)] for rank in stuck
        }
        remaining = {rank for rank, each in found.items() if each}
        if remaining == stuck:
            return found
        stuck = remaining


def format_deadlock(found: Mapping[int, Sequence[tuple[SubmittedOperation, Sequence[int]]]]) -> str:
    """Return an error text that names the operations and ranks."""
    waiting: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in sorted(found):
        submitted, missing = found[rank][0]
        waiting.setdefault((submitted.key, tuple(missing)), []).append(rank)
    texts = [
        f"{format_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} in {key}, which {format_ranks(missing)} "
        f"{'has' if len(missing) == 1 else 'have'} not submitted"
        for (key, missing), ranks in waiting.items()
    ]
    more = f"; and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    error = CollectiveError(
        expected="every rank of a process set to submit the same operations",
        found="; ".join(texts[:MAX_LISTED]) + more,
        fix="give an operation the same kind, name, group size and process set on every rank; unnamed operations are "
        "matched by their order",
    )
    return str(error)
