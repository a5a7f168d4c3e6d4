"""horovodrun's hosts: which of them get workers, and which of their names mean this machine."""

from collections.abc import Sequence

import msgspec

from rankless.config.hosts_and_addresses import (
    Host,
    addresses_of,
    check_hosts,
    interface_towards,
    is_here,
    is_loopback,
    own_host_index,
    parse_hosts,
    read_hostfile,
)
from rankless.config.run_config import Cluster
from rankless.errors import ConfigError
from rankless.extensions.horovodrun.launched_worker import horovod_variables
from rankless.extensions.horovodrun.parser import HorovodrunFlags
from rankless.extensions.horovodrun.settings import NamedHost

START_SECONDS = 30.0
"""horovodrun's default, without `--start-timeout` and HOROVOD_START_TIMEOUT."""


def fill_hosts(flags: HorovodrunFlags, count: int) -> tuple[Host, ...]:
    """Return the hosts that get workers, filled in their order. Raises `ConfigError` for too few slots."""
    found, left = [], count
    for host in list_hosts(flags, count):
        found.append(msgspec.structs.replace(host, workers=min(host.workers, left)))
        left -= found[-1].workers
    return tuple(host for host in found if host.workers)


def list_hosts(flags: HorovodrunFlags, count: int) -> tuple[Host, ...]:
    """Return the hosts of the command line, with all their slots. Raises `ConfigError` for too few slots."""
    if flags.hosts is not None:
        listed = parse_hosts(flags.hosts, workers_per_host=None)
    elif flags.hostfile is not None:
        listed = read_hostfile(flags.hostfile, workers_per_host=None)
    else:
        listed = (Host(address="localhost", workers=count),)
    slots = sum(host.workers for host in listed)
    if slots < count:
        raise ConfigError(
            expected=f"slots for {count} processes",
            found=f"Requested more processes ({count}) than there are available slots ({slots})",
            fix=f"-np {slots}, or more slots: as in -H {listed[0]}:{listed[0].workers + count - slots}",
        )
    return tuple(listed)


def name_hosts(hosts: Sequence[Host]) -> tuple[NamedHost, ...]:
    """Return the hosts under the names that the user gave them."""
    return tuple(NamedHost(name=host.address, slots=host.workers) for host in hosts)


def make_cluster(flags: HorovodrunFlags, hosts: Sequence[Host]) -> Cluster | None:
    """Return the machines, which this one starts by ssh; None for this one only.

    Raises `ConfigError` if this machine is not the first of them.
    """
    machines = _machines(hosts)
    if len(machines) == 1 and is_here(machines[0].address):
        return None
    machines = check_hosts(machines)
    host_index = own_host_index(machines)
    if host_index > 0:
        raise ConfigError(
            expected=f"horovodrun on the host of rank 0, {machines[0]}, which starts the others by ssh",
            found=f"it on {machines[host_index]}",
            fix=f"start it on {machines[0]}, or list {machines[host_index]} first",
        )
    return Cluster(
        hosts=machines,
        host_index=0,
        join_timeout_seconds=start_seconds(flags),
        ssh_port=flags.ssh_port,
        ssh_identity_file=flags.ssh_identity_file,
    )


def start_seconds(flags: HorovodrunFlags) -> float:
    """Return how long to wait for the hosts. Raises `ConfigError` for an invalid value."""
    given = flags.start_timeout if flags.start_timeout is not None else horovod_variables().get("START_TIMEOUT")
    try:
        seconds = START_SECONDS if given is None else float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ConfigError(expected="--start-timeout as seconds above 0", found=given, fix="omit it: 30 s")
    return seconds


def _machines(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Merge neighbours that are both this machine, under an address that the others reach."""
    found: list[Host] = []
    for host in hosts:
        if found and is_here(found[-1].address) and is_here(host.address):
            found[-1] = msgspec.structs.replace(found[-1], workers=found[-1].workers + host.workers)
        else:
            found.append(host)
    others = [host.address for host in found if not is_here(host.address)]
    if others and found and all(map(is_loopback, addresses_of(found[0].address))) and is_here(found[0].address):
        try:
            _, address = interface_towards(others[0])
        except OSError as error:
            raise ConfigError(
                expected=f"a route from this host to {others[0]}", found=error.strerror, fix="check the host's name"
            ) from None
        found[0] = msgspec.structs.replace(found[0], address=address)
    return tuple(found)
