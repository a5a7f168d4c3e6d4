"""What ranks and the coordinator say to each other: typed, checked on decoding, no pickle."""

import msgspec


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A submission as the coordinator sees it: everything but the values."""

    kind: str
    key: str
    set_id: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    """Its type, without a number."""
    reduction: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    rides: bool = False
    """Whether the values travel in the same message."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's first word; `token` is the coordinator's, told through the store."""

    rank: int
    token: str
    host: str
    process_id: int


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks are there: where each runs, in the order of ranks."""

    hosts: tuple[str, ...]
    process_ids: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank has something ready."""

    request: Request


class Again(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank has ready what it has described before, under the number that it got for it."""

    number: int


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank shuts down."""


FromRank = Hello | Submit | Again | Leave


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One operation that all ranks are to execute now."""

    key: str
    number: int = -1
    """To be said in its place from now on, if it is not negative."""
    error: str = ""
    """Ranks do not agree: nothing is executed, each raises this."""
    details: tuple[int, ...] = ()
    """ALLGATHER: rows of every rank. ALLTOALL: rows from every rank. JOIN: the last rank. ADD_SET: the new set's id."""
    request: Request | None = None
    """For a rank that has joined, and takes part with zeros; for ADD_SET, what was asked."""
    rides: bool = False
    """Whether the result's values travel in the same message."""


class Execute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Operations that are executed as one; each rank gets all of its own in the same order."""

    set_id: int
    items: tuple[Item, ...]


class Resend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The coordinator has forgotten a number: describe it anew."""

    number: int


class Down(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of it all, for every rank; `why` is empty where a rank has shut down in order."""

    why: str = ""


FromCoordinator = Welcome | Execute | Resend | Down

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
