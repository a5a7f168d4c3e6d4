"""The description of one rank's call of a collective, and the check that the calls of all ranks match."""

from collections.abc import Sequence

import msgspec

from rankless.errors import CollectiveError
from rankless.records.number_formatting import format_ranks

Shape = tuple[int, ...]

FIX = "make every rank call the same collectives in the same order, with the same shape, dtype and root"


class Call(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's call of a collective.

    `settings` must be equal on all ranks: the reduction, the root, the dtype, and the shape if all ranks have one.
    `send_shapes[rank]` is the shape sent to a rank, `receive_shapes[rank]` the shape expected from it, None for no
    message. Both are None if `settings` describes the whole call.
    """

    operation: str
    settings: str
    send_shapes: tuple[Shape | None, ...] | None = None
    receive_shapes: tuple[Shape | None, ...] | None = None

    def __str__(self) -> str:
        return f"{self.operation}({self.settings})" if self.settings else self.operation


class PostedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call as a rank posts it for the others."""

    call: Call
    line: str


def require_matching(entries: Sequence[PostedCall], names: Sequence[int]) -> None:
    """Raise the same `CollectiveError` on every rank unless the calls of the ranks `names` match."""
    calls = [entry.call for entry in entries]
    if any(call.operation != calls[0].operation for call in calls):
        raise mismatch("all ranks to call the same collective", entries, names)
    if any(call.settings != calls[0].settings for call in calls):
        raise mismatch(f"all ranks to call {calls[0].operation} with the same settings", entries, names)
    for sender, sending in enumerate(calls):
        for receiver, receiving in enumerate(calls):
            given = None if sending.send_shapes is None else sending.send_shapes[receiver]
            wanted = None if receiving.receive_shapes is None else receiving.receive_shapes[sender]
            if given != wanted and sending.send_shapes is not None and receiving.receive_shapes is not None:
                raise CollectiveError(
                    expected=f"rank {names[receiver]} to receive from rank {names[sender]} in {calls[0].operation} "
                    f"the shape that is sent, {format_shape(given)}",
                    found=f"{format_shape(wanted)} expected on rank {names[receiver]} ({entries[receiver].line})",
                    fix="make the lists of shapes, or the split sizes, agree: rank j receives what rank i sends to it",
                    where=entries[sender].line,
                )


def mismatch(expected: str, entries: Sequence[PostedCall], names: Sequence[int]) -> CollectiveError:
    """Return the error, which names calls and lines, and groups the ranks that make the same call."""
    groups: dict[str, list[int]] = {}
    for rank, entry in zip(names, entries, strict=True):
        groups.setdefault(f"{entry.call} at {entry.line}", []).append(rank)
    found = "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())
    return CollectiveError(expected=expected, found=found, fix=FIX)


def format_shape(shape: Shape | None) -> str:
    """Return a text such as "[2, 3]", or "nothing"."""
    return "nothing" if shape is None else str(list(shape))
