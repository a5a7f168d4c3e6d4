"""A job whose workers may come and go while it runs, as Horovod's elastic jobs."""

import msgspec

from rankless.errors import ConfigError


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """Between how many workers a job trains, and where they come from. It begins with `RunRequest.worker_count`."""

    min_workers: int
    max_workers: int | None = None
    """None: as many as the hosts have slots."""
    discovery_script: str | None = None
    """A command that prints the hosts of the moment, one a line, as `host:slots`; without it they stay as they are."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Names and slots of hosts that stay, where no command discovers them; without any, this host has all slots."""
    slots_per_host: int | None = None
    """For hosts that are discovered without a number of their own."""
    elastic_timeout_seconds: float = 600.0
    """How long there may be too few workers before the job is ended."""
    reset_limit: int | None = None
    """How many rounds there may be after the first."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    """None leaves both to ssh."""
    cooldown_range_seconds: tuple[float, float] | None = None
    """How long a host whose workers fail again and again gets no new ones, at first and at most; None: for ever."""
    stall_timeout_seconds: float | None = None
    """After how many seconds a round without progress loses the workers that hold it up; None learns it."""
    has_chosen_interface: bool = False
    """Whether the user's options name the network interface for Gloo, so that rounds do not choose one."""


def check_elastic(elastic: Elastic, worker_count: int) -> None:
    """Raise `ConfigError` for what cannot be meant."""
    least, most = elastic.min_workers, elastic.max_workers
    if least < 1:
        raise ConfigError(expected="--min-np from 1 up", found=least, fix="give the least number of workers")
    if worker_count < least or (most is not None and most < worker_count):
        upper = "" if most is None else f", at most --max-np {most}"
        raise ConfigError(
            expected=f"-np of at least --min-np {least}{upper}",
            found=worker_count,
            fix="-np is how many workers the job begins with",
        )
    if elastic.slots_per_host is not None and elastic.slots_per_host < 1:
        raise ConfigError(
            expected="--slots-per-host from 1 up", found=elastic.slots_per_host, fix="leave it away, or correct it"
        )
    if elastic.reset_limit is not None and elastic.reset_limit < 0:
        raise ConfigError(expected="--reset-limit from 0 up", found=elastic.reset_limit, fix="leave it away: no limit")
    if elastic.elastic_timeout_seconds < 0:
        raise ConfigError(
            expected="--elastic-timeout from 0 seconds up", found=elastic.elastic_timeout_seconds, fix="correct it"
        )
    cooldown = elastic.cooldown_range_seconds
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise ConfigError(
            expected="--blacklist-cooldown-range MIN MAX, in seconds, with 0 < MIN <= MAX",
            found=f"{cooldown[0]:g} {cooldown[1]:g}",
            fix="as in --blacklist-cooldown-range 10 100",
        )
