"""What a program written for Paddle's launcher is given of that launcher's ways."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

FIRST_PORT = 6070
"""Of a host's endpoints, where the hosts have not told each other of free ones: Paddle's own number."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """How fleetrun runs a program. A plan without it follows Rankless's own ways."""

    job_id: str | None = None
    """None: the name of the log folder."""
    shares: tuple[tuple[int, ...], ...] = ()
    """Each worker's GPUs, numbered as CUDA numbers those that are visible now; empty on the CPU."""
    hides_gpus: bool = False
    """Whether the CPU was asked for, so that a program that looks for GPUs must find none."""
    first_port: int | None = None
    """Of the endpoints; None: free ones on one host, FIRST_PORT on several."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """All GPUs of this host's workers, each once."""
        return tuple(dict.fromkeys(gpu for share in self.shares for gpu in share))

    def selected(self, local_rank: int) -> str | None:
        """A worker's share as its program counts GPUs, among `gpus`; None on the CPU."""
        if not self.shares:
            return None
        return ",".join(str(self.gpus.index(gpu)) for gpu in self.shares[local_rank])


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands among all."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host_count: int
    master: str
    """HOST:PORT, at which a script may make a group of its own."""
    endpoints: tuple[str, ...]
    """HOST:PORT of every rank."""
    backend: str
    """By which all workers can talk."""
    run_id: str


def share_out(gpus: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Each of `count` workers' GPUs: neighbours together, the first workers one more where it does not come out even.

    More workers than GPUs take them in turn.
    """
    if count >= len(gpus):
        return tuple((gpus[rank % len(gpus)],) for rank in range(count))
    size, more = divmod(len(gpus), count)
    cuts = [rank * size + min(rank, more) for rank in range(count + 1)]
    return tuple(tuple(gpus[start:end]) for start, end in itertools.pairwise(cuts))


def fleet_variables(fleet: Fleet, place: Place) -> Mapping[str, str | None]:
    """Paddle's variables for one worker; None is one that must not be there."""
    rank, size, local_rank = str(place.rank), str(place.world_size), str(place.local_rank)
    endpoint = place.endpoints[place.rank]
    return {
        "PADDLE_TRAINER_ID": rank,
        "PADDLE_TRAINERS_NUM": size,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(place.endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoint,
        "PADDLE_MASTER": place.master,
        "PADDLE_GLOBAL_RANK": rank,
        "PADDLE_GLOBAL_SIZE": size,
        "PADDLE_LOCAL_RANK": local_rank,
        "PADDLE_LOCAL_SIZE": str(place.local_size),
        "PADDLE_RANK_IN_NODE": local_rank,
        "PADDLE_NNODES": str(place.host_count),
        "PADDLE_JOB_ID": fleet.job_id or place.run_id,
        "PADDLE_PORT": endpoint.rpartition(":")[2],
        "PADDLE_DISTRI_BACKEND": place.backend,
        "POD_IP": endpoint.rpartition(":")[0].strip("[]"),
        "TRAINING_ROLE": "TRAINER",
        "FLAGS_selected_gpus": fleet.selected(place.local_rank),
    }


def endpoint(address: str, port: int) -> str:
    """HOST:PORT, also of an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
