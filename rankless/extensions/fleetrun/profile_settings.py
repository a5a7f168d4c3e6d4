"""The settings of a run under fleetrun's command line."""

import itertools
from collections.abc import Sequence

import msgspec

from rankless.config.launcher_spec import LauncherSpec, make_launcher_spec


class FleetrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How fleetrun runs a program."""

    job_id: str | None = None
    """None: the name of the log folder."""
    shares: tuple[tuple[int, ...], ...] = ()
    """Each worker's GPUs, as CUDA numbers those that are visible to the agent; empty on the CPU."""
    hides_gpus: bool = False
    """The user asks for the CPU, so a program that looks for GPUs must find none."""
    first_port: int | None = None
    """The first port of the endpoints; None takes free ports on one host, and 6070 on several."""
    endpoints: tuple[str, ...] = ()
    """The endpoint of each worker beside parameter servers; without a port it gets a free one."""
    heterogeneous: tuple[int, ...] = ()
    """The ranks of heterogeneous workers, on all hosts."""
    http_port: int | None = None
    """The port of PADDLE_GLOO_HTTP_ENDPOINT; None takes a free one."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """All GPUs of this host's workers, each once."""
        return tuple(dict.fromkeys(gpu for share in self.shares for gpu in share))

    def selected(self, local_rank: int) -> str | None:
        """Return a worker's GPUs as its program numbers them, among `gpus`; None on the CPU."""
        if not self.shares or not self.shares[local_rank]:
            return None
        return ",".join(str(self.gpus.index(gpu)) for gpu in self.shares[local_rank])


def make_fleetrun_spec(settings: FleetrunSettings) -> LauncherSpec:
    """Return the spec of this launcher for a `RunRequest`."""
    return make_launcher_spec("fleetrun", settings)


def share_out(gpus: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide `gpus` among `count` workers: each gets neighbours, and the first workers get one more if it is uneven.

    More workers than GPUs take them in turn.
    """
    if count >= len(gpus):
        return tuple((gpus[rank % len(gpus)],) for rank in range(count))
    size, more = divmod(len(gpus), count)
    cuts = [rank * size + min(rank, more) for rank in range(count + 1)]
    return tuple(tuple(gpus[start:end]) for start, end in itertools.pairwise(cuts))
