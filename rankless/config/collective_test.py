"""A trial collective: what each host's process is told, and what it tells, as lines of JSON behind a mark."""

import msgspec

MARK = b"rankless: "
"""Begins our lines on standard output, where Gloo, and a login's own greetings, write too."""


class AreYouThere(msgspec.Struct, frozen=True, kw_only=True, tag="are you there"):
    """To each: answer once torch is imported."""


class Here(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """Torch is imported."""


class OpenStore(msgspec.Struct, frozen=True, kw_only=True, tag="open store"):
    """To host 0's: serve the store where all meet."""

    address: str


class StoreOpened(msgspec.Struct, frozen=True, kw_only=True, tag="store opened"):
    """The store is served."""

    port: int


class Reduce(msgspec.Struct, frozen=True, kw_only=True, tag="reduce"):
    """Meet the others, and sum tensors with them."""

    address: str
    port: int
    rank: int
    size: int
    interface: str
    timeout_seconds: float


class Reduced(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """The sums were right; how long each size took, in seconds by bytes, and what torch sees here."""

    join_seconds: float
    seconds: dict[int, float]
    torch: str
    cuda_devices: int


class NotReduced(msgspec.Struct, frozen=True, kw_only=True, tag="not reduced"):
    """What went wrong."""

    text: str


TrialTask = AreYouThere | OpenStore | Reduce
TrialResult = Here | StoreOpened | Reduced | NotReduced
