"""The messages between the ranks and the coordinator: typed, checked on decoding, without pickle."""

import msgspec


class RequestMetadata(msgspec.Struct, frozen=True, array_like=True):
    """An operation request as the coordinator receives it, without the tensor's values."""

    kind: str
    key: str
    set_id: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    """The device type, without an index."""
    reduction: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    is_inline: bool = False
    """Whether the values follow in the same message."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's first message. The rank has read the coordinator's `token` from the store."""

    rank: int
    token: str
    host: str
    process_id: int


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks have connected. The fields are in rank order."""

    hosts: tuple[str, ...]
    process_ids: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank has an operation ready."""

    request: RequestMetadata


class SubmitCached(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank has an operation ready that it described before, under the cache id that it received for it."""

    cache_id: int


class Refuse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank refuses operations that other ranks may submit."""

    set_id: int
    keys: tuple[str, ...]
    reason: str


class Wait(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank submits nothing before these operations have ended: by process set and key. Without any, it goes on."""

    operation_ids: tuple[tuple[int, str], ...]


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank shuts down."""


RankMessage = Hello | Submit | SubmitCached | Refuse | Wait | Leave


class OperationResponse(msgspec.Struct, frozen=True, array_like=True):
    """One operation that all ranks execute now."""

    key: str
    cache_id: int = -1
    """The id under which ranks submit the operation from now on, unless it is negative."""
    error: str = ""
    """How the ranks' requests differ. Each rank raises this instead of executing the operation."""
    details: tuple[int, ...] = ()
    """ALLGATHER: rows of every rank. ALLTOALL: rows from every rank. JOIN: the last rank. ADD_SET: the new set's id."""
    request: RequestMetadata | None = None
    """For a rank that has joined and takes part with zeros, and for ADD_SET: what the others requested."""
    is_inline: bool = False
    """Whether the result's values follow in the same message."""


class Execute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Operations that the ranks execute as one. Each rank receives all of its own in the same order."""

    set_id: int
    items: tuple[OperationResponse, ...]


class CacheMiss(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The coordinator has evicted a cache id: the rank must describe the operation in full."""

    cache_id: int


class StopRanks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing more is executed on any rank. The reason is empty if a rank has shut down in order."""

    reason: str = ""


CoordinatorMessage = Welcome | Execute | CacheMiss | StopRanks

encode = msgspec.msgpack.Encoder().encode
decode_rank_message = msgspec.msgpack.Decoder(RankMessage).decode
decode_coordinator_message = msgspec.msgpack.Decoder(CoordinatorMessage).decode
