"""Whether what the ranks have submitted under one key fits together. The texts are Horovod's.

Groups and the ranks of new sets need no look: they are part of the key.
"""

from collections.abc import Mapping, Sequence

from rankless.compat.horovod.engine.messages import Request


def disagreement(requests: Mapping[int, Request], joined: Sequence[int]) -> str:
    """What does not fit together, or nothing; `requests` by rank, in the order of ranks."""
    first, *others = [requests[rank] for rank in sorted(requests)]
    for other in others:
        if other is not first and other != first and (text := _between(first, other)):
            return text
    if joined and first.kind != "allreduce":
        return _with_joined(first.kind)
    if first.kind == "allgather" and not first.shape:
        return "Rank zero tried to gather a rank-zero tensor."
    return ""


def _between(one: Request, other: Request) -> str:
    kind = one.kind.upper()
    if one.kind != other.kind:
        return f"Mismatched operations: One rank did an {kind}, but another rank did an {other.kind.upper()}."
    if one.dtype != other.dtype:
        return f"Mismatched data types: One rank had type {one.dtype}, but another rank had type {other.dtype}."
    if one.device != other.device:
        here, there = ("CPU" if item.device == "cpu" else "GPU" for item in (one, other))
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {here}, "
            f"but another rank specified device {there}."
        )
    return _shapes(one, other) or _settings(one, other)


def _shapes(one: Request, other: Request) -> str:
    what = f"Mismatched {one.kind.upper()} tensor shapes: One rank sent a tensor"
    if one.kind in ("allgather", "alltoall"):
        if len(one.shape) != len(other.shape):
            return f"{what} of rank {len(one.shape)}, but another rank sent a tensor of rank {len(other.shape)}."
        for dim in range(1, len(one.shape)):
            if one.shape[dim] != other.shape[dim]:
                return (
                    f"{what} with dimension {dim} equal to {one.shape[dim]}, "
                    f"but another rank sent a tensor with dimension {dim} equal to {other.shape[dim]}."
                )
    elif one.shape != other.shape:
        return f"{what} of shape {list(one.shape)}, but another rank sent a tensor of shape {list(other.shape)}."
    return ""


def _settings(one: Request, other: Request) -> str:
    if one.root != other.root:
        return (
            f"Mismatched {one.kind.upper()} root ranks: One rank specified root rank {one.root}, "
            f"but another rank specified root rank {other.root}."
        )
    if one.reduction != other.reduction:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {one.reduction}, "
            f"but another rank sent reduction op {other.reduction}."
        )
    if (one.prescale, one.postscale) != (other.prescale, other.postscale):
        return (
            "Mismatched prescale and/or postscale factors: "
            f"One rank sent factors ({one.prescale:g}, {one.postscale:g}), "
            f"but another rank sent factors ({other.prescale:g}, {other.postscale:g})."
        )
    return ""


def _with_joined(kind: str) -> str:
    hint = " Specify sparse_to_dense=True if using DistributedOptimizer" if kind == "allgather" else ""
    return f"{kind.capitalize()} is not supported with Join at this time.{hint}"
