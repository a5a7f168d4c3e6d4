"""The rendezvous of processes that no launcher has started: the arguments of `rankless.init`."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rankless.config.hosts_and_addresses import Endpoint
from rankless.errors import ConfigError

ADDRESS_FORMS = "tcp://HOST:PORT or file:///SHARED/PATH"


@dataclass(frozen=True, kw_only=True)
class RendezvousParameters:
    """The address at which all ranks of a job rendezvous, the rank of this process, and the number of ranks."""

    kind: Literal["tcp", "file"]
    host: str = ""
    port: int = 0
    path: str = ""
    rank: int
    world_size: int
    timeout_seconds: float
    served_by_launcher: bool = False
    """Whether a launcher serves a store at the address. Otherwise rank 0 does."""

    def __str__(self) -> str:
        return f"tcp://{Endpoint(self.host, self.port)}" if self.kind == "tcp" else f"file://{self.path}"


def parse_rendezvous_address(
    address: str, *, rank: int | None, world_size: int | None, timeout_seconds: float
) -> RendezvousParameters:
    """Parse the arguments of `rankless.init`. Raises ConfigError if they are incomplete or invalid."""
    if rank is None or world_size is None:
        raise ConfigError(
            expected=f"rank= and world_size= beside the address {address!r}",
            found=f"rank={rank}, world_size={world_size}",
            fix="pass both: without a launcher only the script knows them",
        )
    if not (isinstance(world_size, int) and isinstance(rank, int) and 0 <= rank < world_size):
        raise ConfigError(
            expected="a rank from 0 to world_size - 1",
            found=f"rank={rank!r}, world_size={world_size!r}",
            fix="number the processes from 0",
        )
    parts = urlsplit(address)
    if parts.scheme == "tcp" and parts.hostname and _parse_port(address):
        return RendezvousParameters(
            kind="tcp",
            host=parts.hostname,
            port=_parse_port(address),
            rank=rank,
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return RendezvousParameters(
            kind="file", path=parts.path, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds
        )
    raise ConfigError(
        expected=f"an address of the form {ADDRESS_FORMS}",
        found=address,
        fix="write a file with three slashes and a path that all hosts share, a port as a number from 1 to 65535",
    )


def _parse_port(address: str) -> int:
    try:
        return urlsplit(address).port or 0
    except ValueError:
        return 0
