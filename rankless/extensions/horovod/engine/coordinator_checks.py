"""Checks that the requests of all ranks for one key match, and that ranks do not wait for each other without end.

The error texts of requests that do not match are Horovod's, followed by the operation and the ranks. Groups need no
check: they are part of the key.
"""

from collections.abc import Mapping, Sequence

from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.coordinator_table import SubmittedOperation
from rankless.extensions.horovod.engine.messages import RequestMetadata
from rankless.records.quantities import format_ranks


def find_mismatch(key: str, requests: Mapping[int, RequestMetadata], joined: Sequence[int]) -> str:
    """Return how the requests for a key differ, or an empty string. The requests are by rank."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        if other is not first and other != first and (text := _compare(first, other)):
            alike = [one for one in ranks if requests[one] is first or not _compare(first, requests[one])]
            differing = [one for one in ranks if _compare(first, requests[one]) == text]
            return f"{text} Operation {key}: the first is {format_ranks(alike)}, the other {format_ranks(differing)}."
    if joined and first.kind != "allreduce":
        return f"{_format_join_error(first.kind)} Operation {key}: joined is {format_ranks(joined)}."
    if first.kind == "allgather" and not first.shape:
        return f"Rank zero tried to gather a rank-zero tensor. Operation {key}."
    return ""


def _compare(first: RequestMetadata, other: RequestMetadata) -> str:
    kind = first.kind.upper()
    if first.kind != other.kind:
        return f"Mismatched operations: One rank did an {kind}, but another rank did an {other.kind.upper()}."
    if first.kind in ("add_process_set", "remove_process_set"):
        return _compare_process_sets(first, other)
    if first.dtype != other.dtype:
        return f"Mismatched data types: One rank had type {first.dtype}, but another rank had type {other.dtype}."
    if first.device != other.device:
        here, there = ("CPU" if item.device == "cpu" else "GPU" for item in (first, other))
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {here}, "
            f"but another rank specified device {there}."
        )
    return _compare_shapes(first, other) or _compare_settings(first, other)


def _compare_process_sets(first: RequestMetadata, other: RequestMetadata) -> str:
    if first.ranks != other.ranks:
        return (
            f"Mismatched process sets: One rank added a process set of ranks {list(first.ranks)}, "
            f"but another rank added one of ranks {list(other.ranks)}."
        )
    if first.root != other.root:
        return (
            f"Mismatched process sets: One rank removed process set {first.root}, "
            f"but another rank removed process set {other.root}."
        )
    return ""


def _compare_shapes(first: RequestMetadata, other: RequestMetadata) -> str:
    prefix = f"Mismatched {first.kind.upper()} tensor shapes: One rank sent a tensor"
    if first.kind in ("allgather", "alltoall"):
        if len(first.shape) != len(other.shape):
            return f"{prefix} of rank {len(first.shape)}, but another rank sent a tensor of rank {len(other.shape)}."
        for dim in range(1, len(first.shape)):
            if first.shape[dim] != other.shape[dim]:
                return (
                    f"{prefix} with dimension {dim} equal to {first.shape[dim]}, "
                    f"but another rank sent a tensor with dimension {dim} equal to {other.shape[dim]}."
                )
    elif first.shape != other.shape:
        return f"{prefix} of shape {list(first.shape)}, but another rank sent a tensor of shape {list(other.shape)}."
    return ""


def _compare_settings(first: RequestMetadata, other: RequestMetadata) -> str:
    if first.root != other.root:
        return (
            f"Mismatched {first.kind.upper()} root ranks: One rank specified root rank {first.root}, "
            f"but another rank specified root rank {other.root}."
        )
    if first.reduction != other.reduction:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {first.reduction}, "
            f"but another rank sent reduction op {other.reduction}."
        )
    if (first.prescale, first.postscale) != (other.prescale, other.postscale):
        return (
            "Mismatched prescale and/or postscale factors: "
            f"One rank sent factors ({first.prescale:g}, {first.postscale:g}), "
            f"but another rank sent factors ({other.prescale:g}, {other.postscale:g})."
        )
    return ""


def _format_join_error(kind: str) -> str:
    hint = " Specify sparse_to_dense=True if using DistributedOptimizer." if kind == "allgather" else ""
    return f"{kind.capitalize()} is not supported with Join at this time.{hint}"


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
