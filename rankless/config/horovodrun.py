"""What a program written for horovodrun is given of that launcher's ways."""

from collections.abc import Mapping

import msgspec

from rankless.config.rank_layout import assign_ranks
from rankless.records.elastic_messages import RankAssignment


class NamedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host by the name that the user gave it; two names may mean one machine."""

    name: str
    slots: int
    """How many of the job's workers it has."""


class Horovod(msgspec.Struct, frozen=True, kw_only=True):
    """How horovodrun runs a program. A plan without it follows Rankless's own ways."""

    hosts: tuple[NamedHost, ...]
    """In the order of their ranks."""
    variables: tuple[tuple[str, str], ...] = ()
    """What its options set in every worker's environment; they win over what is set there already."""
    output_folder: str | None = None
    """Where `rank.N/stdout` and `rank.N/stderr` go; None: into the run's own folder."""
    timestamps: bool = False
    """Whether the time stands before each line that is shown."""

    @property
    def size(self) -> int:
        """How many workers the job has."""
        return sum(host.slots for host in self.hosts)


def find_rank_assignment(horovod: Horovod, rank: int) -> tuple[str, RankAssignment]:
    """The host of one of the job's ranks, as the user named it, and its seat."""
    places = [place for place, host in enumerate(horovod.hosts) for _ in range(host.slots)]
    return horovod.hosts[places[rank]].name, assign_ranks(places)[rank]


def slot_variables(horovod: Horovod, rank: int, *, interface: str) -> Mapping[str, str | None]:
    """Horovod's variables for one worker; `interface` is the network card by which all of them talk."""
    host, assignment = find_rank_assignment(horovod, rank)
    own = {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(assignment.rank),
        "HOROVOD_SIZE": str(assignment.size),
        "HOROVOD_LOCAL_RANK": str(assignment.local_rank),
        "HOROVOD_LOCAL_SIZE": str(assignment.local_size),
        "HOROVOD_CROSS_RANK": str(assignment.cross_rank),
        "HOROVOD_CROSS_SIZE": str(assignment.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "PYTHONUNBUFFERED": "1",
    }
    return {**own, **dict(horovod.variables)}


def rendezvous_variables(address: str, port: int | None) -> Mapping[str, str | None]:
    """Where the ranks of a real Horovod find each other; without a server, not where those of an outer job did."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": None if port is None else address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": None if port is None else str(port),
    }


def elastic_variables(horovod: Horovod, *, host: str, local_rank: int, interface: str) -> Mapping[str, str | None]:
    """Horovod's variables for a worker of an elastic job, whose rank and number of peers change: it asks `hvd`."""
    own = {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "PYTHONUNBUFFERED": "1",
    }
    return {**own, **dict(horovod.variables)}


def padded_rank(horovod: Horovod, rank: int) -> str:
    """A rank as the names of folders have it: in as many digits as the last one's."""
    return str(rank).zfill(len(str(horovod.size - 1)))
