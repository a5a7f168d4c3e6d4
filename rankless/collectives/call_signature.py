"""What a rank is about to do in a collective, and whether what all ranks are about to do fits together."""

from collections.abc import Sequence

import msgspec

from rankless.errors import CollectiveError

Shape = tuple[int, ...]

FIX = "make every rank's script come to the same collectives in the same order, with the same shape, dtype and root"


class Call(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's call of a collective.

    `settings` (what is reduced how, to or from which rank, dtype, and the shape where all ranks have one) must be equal
    on all ranks. `sends[rank]` is the shape that goes to a rank, `takes[rank]` the shape that is expected from it; None
    where nothing goes. Both are left out where `settings` says it all.
    """

    operation: str
    settings: str
    send_shapes: tuple[Shape | None, ...] | None = None
    receive_shapes: tuple[Shape | None, ...] | None = None

    def __str__(self) -> str:
        return f"{self.operation}({self.settings})" if self.settings else self.operation


class PostedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call as a rank writes it down for the others."""

    call: Call
    line: str


def require_fitting(entries: Sequence[PostedCall], names: Sequence[int]) -> None:
    """Raise CollectiveError, the same on every rank, unless the calls of the ranks `names` fit together."""
    calls = [entry.call for entry in entries]
    if any(call.operation != calls[0].operation for call in calls):
        raise mismatch("all ranks to call the same collective", entries, names)
    if any(call.settings != calls[0].settings for call in calls):
        raise mismatch(f"all ranks to call {calls[0].operation} alike", entries, names)
    for sender, sent in enumerate(calls):
        for taker, taken in enumerate(calls):
            given = None if sent.send_shapes is None else sent.send_shapes[taker]
            wanted = None if taken.receive_shapes is None else taken.receive_shapes[sender]
            if given != wanted and sent.send_shapes is not None and taken.receive_shapes is not None:
                raise CollectiveError(
                    expected=f"what rank {names[taker]} takes from rank {names[sender]} in {calls[0].operation} "
                    f"to have the shape sent: {format_shape(given)}",
                    found=f"room for {format_shape(wanted)} on rank {names[taker]} ({entries[taker].line})",
                    fix="make the lists of shapes, or the split sizes, agree: what i sends to j is what j takes from i",
                    where=entries[sender].line,
                )


def mismatch(expected: str, entries: Sequence[PostedCall], names: Sequence[int]) -> CollectiveError:
    """The error: who calls what, and where; ranks that do the same stand together."""
    groups: dict[str, list[int]] = {}
    for rank, entry in zip(names, entries, strict=True):
        groups.setdefault(f"{entry.call} at {entry.line}", []).append(rank)
    found = "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())
    return CollectiveError(expected=expected, found=found, fix=FIX)


def format_ranks(ranks: Sequence[int]) -> str:
    """As "rank 2" or "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def format_shape(shape: Shape | None) -> str:
    """A shape as people write it."""
    return "nothing" if shape is None else str(list(shape))
