"""Where processes that no launcher has told of each other are to meet: what `rankless.init` is given."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rankless.errors import ConfigError

FORMS = "tcp://HOST:PORT or file:///SHARED/PATH"


@dataclass(frozen=True, kw_only=True)
class RendezvousParameters:
    """A place to meet, this process's rank, and how many ranks there are to be."""

    kind: Literal["tcp", "file"]
    host: str = ""
    port: int = 0
    path: str = ""
    rank: int
    world_size: int
    timeout_seconds: float
    served: bool = False
    """Whether a launcher serves a store at the address; else rank 0 does."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" if self.kind == "tcp" else f"file://{self.path}"


def parse_rendezvous_address(
    address: str, *, rank: int | None, world_size: int | None, timeout_seconds: float
) -> RendezvousParameters:
    """What the arguments of `rankless.init` mean. Raises ConfigError for what cannot be meant."""
    if rank is None or world_size is None:
        raise ConfigError(
            expected=f"rank= and world_size= beside the address {address!r}",
            found=f"rank={rank}, world_size={world_size}",
            fix="pass both; without a launcher only the script knows them",
        )
    if not (isinstance(world_size, int) and isinstance(rank, int) and 0 <= rank < world_size):
        raise ConfigError(
            expected="a rank from 0 to world_size - 1",
            found=f"rank={rank!r}, world_size={world_size!r}",
            fix="number the processes from 0",
        )
    parts = urlsplit(address)
    if parts.scheme == "tcp" and parts.hostname and _port_of(address):
        return RendezvousParameters(
            kind="tcp",
            host=parts.hostname,
            port=_port_of(address),
            rank=rank,
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return RendezvousParameters(
            kind="file", path=parts.path, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds
        )
    raise ConfigError(
        expected=f"an address as {FORMS}",
        found=address,
        fix="a file has three slashes, and its path is one that all hosts share; a port is a number from 1 to 65535",
    )


def _port_of(address: str) -> int:
    try:
        return urlsplit(address).port or 0
    except ValueError:
        return 0
