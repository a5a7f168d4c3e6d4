"""Turns horovodrun's elastic options into an `Elastic` config."""

from collections.abc import Mapping

from rankless.config.elastic import Elastic
from rankless.extensions.horovodrun.hosts import list_hosts
from rankless.extensions.horovodrun.launched_worker import horovod_variables
from rankless.extensions.horovodrun.parser import HorovodrunFlags

ELASTIC_SECONDS = 600.0
"""horovodrun's default, without `--elastic-timeout` and HOROVOD_ELASTIC_TIMEOUT."""


def make_elastic(flags: HorovodrunFlags, count: int, variables: Mapping[str, str]) -> Elastic:
    """Return the limits and hosts of an elastic job. Raises `ConfigError` for invalid hosts.

    `variables` are what the options set in every worker. `config.validation` checks the limits.
    """
    cooldown = flags.blacklist_cooldown_range
    return Elastic(
        min_workers=count if flags.min_num_proc is None else flags.min_num_proc,
        max_workers=flags.max_num_proc,
        discovery_script=flags.host_discovery_script,
        hosts=() if flags.host_discovery_script is not None else _fixed_hosts(flags, count),
        slots_per_host=flags.slots_per_host,
        elastic_timeout_seconds=_timeout(flags),
        reset_limit=flags.reset_limit,
        ssh_port=flags.ssh_port,
        ssh_identity_file=flags.ssh_identity_file,
        cooldown_range_seconds=None if cooldown is None else (float(cooldown[0]), float(cooldown[1])),
        stall_timeout_seconds=_stall_timeout(variables),
        has_chosen_interface="GLOO_SOCKET_IFNAME" in variables,
    )


def _stall_timeout(variables: Mapping[str, str]) -> float | None:
    name = "STALL_SHUTDOWN_TIME_SECONDS"
    try:
        return float(variables.get(f"HOROVOD_{name}") or horovod_variables().get(name, "")) or None
    except ValueError:
        return None


def _timeout(flags: HorovodrunFlags) -> float:
    if flags.elastic_timeout is not None:
        return float(flags.elastic_timeout)
    given = horovod_variables().get("ELASTIC_TIMEOUT", "")
    return float(given) if given.replace(".", "", 1).isdigit() else ELASTIC_SECONDS


def _fixed_hosts(flags: HorovodrunFlags, count: int) -> tuple[tuple[str, int], ...]:
    return tuple((host.address, host.workers) for host in list_hosts(flags, count))
