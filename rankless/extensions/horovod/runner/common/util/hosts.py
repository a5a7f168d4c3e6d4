"""Hosts, their slots, and the ranks that a job gives to them."""

import re
from dataclasses import dataclass
from pathlib import Path

from rankless.records.elastic_driver_protocol import assign_ranks

HOST_PATTERN = re.compile(r"^\[?(?P<name>[^\s:\]]+|[0-9a-fA-F:]+)\]?:(?P<slots>\d+)$")
LINE_PATTERN = re.compile(r"^(?P<name>\S+)(\s+slots\s*=\s*(?P<slots>\d+))?$")


@dataclass(frozen=True)
class HostInfo:
    """A host and its number of slots."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> "HostInfo":
        """Return the host of a text such as `server:4`. Raises ValueError for any other text."""
        found = HOST_PATTERN.match(host_string.strip())
        if found is None:
            raise ValueError(
                f"Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. {host_string}"
            )
        return HostInfo(found["name"], int(found["slots"]))


@dataclass(frozen=True)
class SlotInfo:
    """The ranks of one process."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """Return the numbers as text, separated by commas."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo(hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1)
"""The ranks of a process that has none."""


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Return the hosts of a text such as `server1:4,server2:4`. Raises ValueError for any other text."""
    return [HostInfo.from_string(text) for text in hosts_string.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the names of the hosts, and the number of slots by name."""
    infos = parse_hosts(hosts)
    return [info.hostname for info in infos], {info.hostname: info.slots for info in infos}


def parse_host_files(filename: str) -> str:
    """Return the hosts of a file with a line such as `server slots=4` for each, as `server:4,…`."""
    hosts = []
    for line in map(str.strip, Path(filename).read_text().splitlines()):
        if line and not line.startswith("#"):
            found = LINE_PATTERN.match(line)
            if found is None:
                raise ValueError(f"{filename}: expected a line such as `server slots=4`, found {line!r}")
            hosts.append(f"{found['name']}:{found['slots'] or 1}")
    return ",".join(hosts)


def get_host_assignments(hosts: list[HostInfo], min_num_proc: int, max_num_proc: int | None = None) -> list[SlotInfo]:
    """Return the ranks of the processes, by rank: each host is filled before the next.

    Args:
        hosts: The hosts.
        min_num_proc: The smallest number of processes.
        max_num_proc: The largest number. Default the smallest number.

    Raises:
        ValueError: The hosts have fewer slots than `min_num_proc`.
    """
    names = [info.hostname for info in hosts for _ in range(info.slots)]
    if len(names) < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({len(names)})")
    names = names[: max_num_proc or min_num_proc]
    return [
        SlotInfo(
            hostname=name,
            rank=each.rank,
            local_rank=each.local_rank,
            cross_rank=each.cross_rank,
            size=each.size,
            local_size=each.local_size,
            cross_size=each.cross_size,
        )
        for name, each in zip(names, assign_ranks(names), strict=True)
    ]
