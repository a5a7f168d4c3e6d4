"""The configuration of an elastic job, whose number of workers may change while it runs."""

import msgspec

from rankless.errors import ConfigError


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an elastic job, and its hosts. It begins with `RunRequest.worker_count` workers."""

    min_workers: int
    max_workers: int | None = None
    """None: as many workers as the hosts have slots."""
    discovery_script: str | None = None
    """A command that prints the present hosts, one per line, as `host:slots`; None keeps `hosts`."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Names and slots of the hosts if no command discovers them; without any, this host has all slots."""
    slots_per_host: int | None = None
    """The slots of hosts that the command prints without a number."""
    elastic_timeout_seconds: float = 600.0
    """How long the job waits for enough workers before it ends."""
    reset_limit: int | None = None
    """The most rounds after the first; None sets no limit."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    """None: ssh chooses both the port and the file."""
    cooldown_range_seconds: tuple[float, float] | None = None
    """How long a host whose workers fail repeatedly gets no new ones, at first and at most; None: for ever."""
    stall_timeout_seconds: float | None = None
    """After how many seconds a round without progress loses the workers that hold it up; None learns it."""
    has_chosen_interface: bool = False
    """Whether the user's options name the network interface for Gloo, so that rounds do not choose one."""


def check_elastic(elastic: Elastic, worker_count: int) -> None:
    """Raise `ConfigError` if the limits contradict each other or are out of range."""
    least, most = elastic.min_workers, elastic.max_workers
    if least < 1:
        raise ConfigError(expected="--min-np from 1 up", found=least, fix="give the smallest number of workers")
    if worker_count < least or (most is not None and most < worker_count):
        upper = "" if most is None else f", at most --max-np {most}"
        raise ConfigError(
            expected=f"-np of at least --min-np {least}{upper}",
            found=worker_count,
            fix="-np is the number of workers at the start",
        )
    if elastic.slots_per_host is not None and elastic.slots_per_host < 1:
        raise ConfigError(
            expected="--slots-per-host from 1 up", found=elastic.slots_per_host, fix="omit it, or correct it"
        )
    if elastic.reset_limit is not None and elastic.reset_limit < 0:
        raise ConfigError(expected="--reset-limit from 0 up", found=elastic.reset_limit, fix="omit it to set no limit")
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
