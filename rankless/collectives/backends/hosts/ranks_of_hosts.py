"""Which ranks of a group are on which host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RanksOfHosts:
    """The hosts of a group, and one rank's place."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    """The ranks on each host, in order. Hosts are in the order of their first ranks: all ranks have equal layouts."""

    @classmethod
    def from_identities(cls, rank: int, identities: Sequence[str]) -> "RanksOfHosts":
        """Return the layout of ranks whose hosts have these identities, in the order of ranks."""
        names = list(dict.fromkeys(identities))
        hosts = tuple(tuple(peer for peer, identity in enumerate(identities) if identity == name) for name in names)
        return cls(rank=rank, hosts=hosts)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.find_host(self.rank)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.hosts[self.host]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(members[0] for members in self.hosts)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.members[0] == self.rank

    def find_host(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(index for index, members in enumerate(self.hosts) if rank in members)
