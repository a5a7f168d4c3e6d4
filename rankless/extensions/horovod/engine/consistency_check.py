"""Checks that the requests of all ranks for one key match.

The error texts are Horovod's, followed by the operation and the ranks. Groups need no check: they are part of the key.
"""

from collections.abc import Mapping, Sequence

from rankless.collectives.call_signature import format_ranks
from rankless.extensions.horovod.engine.messages import RequestMetadata


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
