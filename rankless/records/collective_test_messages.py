"""The messages of the doctor's collective test to and from each host's process, as lines of JSON after a mark."""

import msgspec

MARK = b"rankless: "
"""Precedes our lines on standard output, where Gloo and a login shell write too."""


class CheckTorch(msgspec.Struct, frozen=True, kw_only=True, tag="are you there"):
    """To each process: answer once torch is imported."""


class TorchImported(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """Torch is imported."""


class ServeStore(msgspec.Struct, frozen=True, kw_only=True, tag="open store"):
    """To host 0's process: serve the store that all processes use."""

    address: str


class StoreServedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="store opened"):
    """The store listens at `port`."""

    port: int


class RunAllReduce(msgspec.Struct, frozen=True, kw_only=True, tag="reduce"):
    """Make a process group with the other hosts and sum tensors with them."""

    address: str
    port: int
    rank: int
    size: int
    interface: str
    timeout_seconds: float


class AllReduceResult(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """The sums are right: the seconds for each size in bytes, torch's version, and the number of CUDA devices."""

    join_seconds: float
    seconds: dict[int, float]
    torch: str
    cuda_devices: int


class AllReduceFailed(msgspec.Struct, frozen=True, kw_only=True, tag="not reduced"):
    """The error of a test that failed."""

    text: str


CollectiveTestTask = CheckTorch | ServeStore | RunAllReduce
CollectiveTestResult = TorchImported | StoreServedMessage | AllReduceResult | AllReduceFailed
