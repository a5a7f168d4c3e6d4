"""fleetrun's options about hosts: `--ips`, the same line on each; or `--nnodes`, `--master` and `--rank`."""

import msgspec

from rankless.config.hosts_and_addresses import (
    DEFAULT_PORT,
    Host,
    add_heterogeneous,
    addresses_of,
    check_hosts,
    numbered_hosts,
    own_addresses,
    own_host_index,
)
from rankless.config.run_config import UNKNOWN_HOST, Cluster
from rankless.errors import ConfigError
from rankless.extensions.fleetrun.parser import FleetrunFlags


def make_cluster(
    flags: FleetrunFlags, *, workers: int, heterogeneous: int = 0, listed: tuple[Host, ...] = ()
) -> Cluster | None:
    """Return the hosts, on each of which the user types the command; None for this host only.

    Args:
        flags: The options.
        workers: The number of workers of each host.
        heterogeneous: How many of them are heterogeneous.
        listed: The hosts of a list of workers, with their own numbers of workers.

    Raises `ConfigError` for options that contradict each other.
    """
    _require_fixed(flags)
    if listed and flags.ips:
        raise ConfigError(
            expected="one way of naming the hosts", found=f"--ips={flags.ips} and --workers", fix="omit --ips"
        )
    if listed:
        return _listed("--workers", flags, check_hosts(listed))
    others = workers - heterogeneous
    if flags.ips:
        named = _list_addresses(flags, [address.strip() for address in flags.ips.split(",")], others)
        return _listed("--ips", flags, add_heterogeneous(named, heterogeneous))
    count = count_hosts(flags)
    if count == 1:
        if flags.rank not in (None, -1, 0):
            raise ConfigError(
                expected="--rank 0, the only host's number", found=flags.rank, fix="omit it, or give --nnodes"
            )
        return None
    cluster = _numbered(flags, count, others)
    return msgspec.structs.replace(cluster, hosts=add_heterogeneous(cluster.hosts, heterogeneous))


def _list_addresses(flags: FleetrunFlags, addresses: list[str], workers: int) -> tuple[Host, ...]:
    """Return the hosts of `--ips`."""
    if any(not address or address.count(":") == 1 or "]:" in address for address in addresses):
        raise ConfigError(
            expected='--ips as "10.0.0.1,10.0.0.2": addresses without ports',
            found=flags.ips,
            fix="correct it; --master=10.0.0.1:9988 gives the port of the rendezvous",
        )
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            expected="each host of --ips once",
            found=flags.ips,
            fix="name it once; --gpus or --nproc_per_node give the number of processes of a host",
        )
    return check_hosts([Host(address=address.strip("[]"), workers=workers) for address in addresses])


def _listed(option: str, flags: FleetrunFlags, hosts: tuple[Host, ...]) -> Cluster | None:
    """Return the hosts of a list. The first host sends the token by ssh, unless the others have a file with it."""
    host_index = own_host_index(hosts)
    number = {"--nnodes": (_read_host_count(flags) if flags.nnodes or flags.np else len(hosts), len(hosts))}
    number["--rank"] = (host_index if flags.rank in (None, -1) else flags.rank, host_index)
    for name, (given, found) in number.items():
        if given != found:
            raise ConfigError(
                expected=f"{name} {found}, as {option} and this host's addresses say", found=given, fix="omit it"
            )
    if len(hosts) == 1:
        return None
    port = DEFAULT_PORT
    if flags.master:
        address, port = _master(flags.master)
        if address != hosts[0].address:
            raise ConfigError(
                expected=f"--master={hosts[0]}:PORT, the first host of {option}", found=flags.master, fix="correct it"
            )
    return Cluster(
        hosts=hosts, host_index=host_index, port=port, agent_start="script", is_listed=True, insecure=flags.insecure
    )


def _numbered(flags: FleetrunFlags, count: int, workers: int) -> Cluster:
    """Return as many hosts as `--nnodes` gives. The host with the address of `--master` is the first."""
    if not flags.master:
        raise ConfigError(
            expected=f"--master HOST:PORT, the rendezvous of {count} hosts",
            found="none",
            fix="name the first host, the same on all; or list them: --ips=10.0.0.1,10.0.0.2",
        )
    address, port = _master(flags.master)
    host_index = flags.rank
    if host_index in (None, -1):
        host_index = 0 if addresses_of(address) & own_addresses() else UNKNOWN_HOST
    elif not 0 <= host_index < count:
        raise ConfigError(expected=f"--rank from 0 to {count - 1}", found=host_index, fix="number the hosts from 0")
    return Cluster(
        hosts=numbered_hosts(address, count, workers=workers),
        host_index=host_index,
        port=port,
        agent_start="manual",
        is_listed=False,
        insecure=flags.insecure,
    )


def _master(text: str) -> tuple[str, int]:
    scheme, found, rest = text.rpartition("://")
    address, _, port = rest.rpartition(":")
    if (found and scheme not in ("http", "tcp")) or not address or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(
            expected="--master HOST:PORT, the first host's",
            found=text,
            fix="as in --master 10.0.0.1:9988" + ("; Rankless does not use etcd" if scheme == "etcd" else ""),
        )
    return address.strip("[]"), int(port)


def count_hosts(flags: FleetrunFlags) -> int:
    """Return the number of hosts of `--ips`, or of `--nnodes`."""
    return len(flags.ips.split(",")) if flags.ips else _read_host_count(flags)


def _read_host_count(flags: FleetrunFlags) -> int:
    text = flags.nnodes or flags.np or "1"
    least, _, most = text.partition(":")
    if not least.isdigit() or int(least) < 1 or (most and not most.isdigit()):
        raise ConfigError(expected="--nnodes as a number from 1 up", found=text, fix="one host is --nnodes 1")
    if most and most != least:
        raise ConfigError(
            expected="a fixed number of hosts: none can join or leave while the job runs",
            found=f"--nnodes {text}",
            fix=f"--nnodes {most}",
        )
    return int(least)


def _require_fixed(flags: FleetrunFlags) -> None:
    if flags.elastic_server or flags.scale:
        raise ConfigError(
            expected="fixed hosts with names: none can join or leave while the job runs",
            found=f"--elastic_server={flags.elastic_server}" if flags.elastic_server else f"--scale={flags.scale}",
            fix="name the hosts: --ips=10.0.0.1,10.0.0.2, or --nnodes 2 --master 10.0.0.1:9988",
        )
