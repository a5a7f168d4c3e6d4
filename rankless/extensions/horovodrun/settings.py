"""The settings of a run under horovodrun's command line."""

import msgspec

from rankless.config.run_config import LauncherSpec, make_launcher_spec
from rankless.records.elastic_driver_protocol import RankAssignment, assign_ranks


class NamedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host under the name that the user gives it. Two names may mean one machine."""

    name: str
    slots: int
    """The number of the job's workers on it."""


class HorovodrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How horovodrun runs a program."""

    hosts: tuple[NamedHost, ...]
    """In the order of their ranks."""
    variables: tuple[tuple[str, str], ...] = ()
    """What the options set in every worker's environment. They override variables that are set there already."""
    output_folder: str | None = None
    """The folder for `rank.N/stdout` and `rank.N/stderr`; None takes the run's own folder."""
    timestamps: bool = False
    """Show the time before each line of output."""

    @property
    def size(self) -> int:
        """The number of workers of the job."""
        return sum(host.slots for host in self.hosts)

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[self._host_indices()[rank]].name

    def assignment_of(self, rank: int) -> RankAssignment:
        """Return where a rank stands in the job."""
        return assign_ranks(self._host_indices())[rank]

    def padded_rank(self, rank: int) -> str:
        """Return a rank as folder names have it, with as many digits as the last rank."""
        return str(rank).zfill(len(str(self.size - 1)))

    def _host_indices(self) -> list[int]:
        return [index for index, host in enumerate(self.hosts) for _ in range(host.slots)]


def make_horovodrun_spec(settings: HorovodrunSettings) -> LauncherSpec:
    """Return the spec of this launcher for a `RunRequest`."""
    return make_launcher_spec("horovodrun", settings)
