"""fleetrun's options about hosts: `--ips`, the same line on each; or `--nnodes`, `--master` and `--rank`."""

from rankless.config.hosts import (
    DEFAULT_PORT,
    Host,
    addresses_of,
    check_hosts,
    numbered_hosts,
    own_addresses,
    own_host_index,
)
from rankless.config.run_config import UNKNOWN_HOST, Cluster
from rankless.errors import ConfigError
from rankless.launchers.fleetrun.options import FleetrunFlags


def make_cluster(flags: FleetrunFlags, *, workers: int) -> Cluster | None:
    """The hosts, each started by its own line; None for this one alone. Raises ConfigError for what cannot be meant."""
    _require_fixed(flags)
    if flags.ips:
        return _listed(flags, [address.strip() for address in flags.ips.split(",")], workers)
    count = _host_count(flags)
    if count == 1:
        if flags.rank not in (None, -1, 0):
            raise ConfigError(
                expected="--rank 0, the only host's number", found=flags.rank, fix="leave it away, or say --nnodes"
            )
        return None
    return _numbered(flags, count, workers)


def _listed(flags: FleetrunFlags, addresses: list[str], workers: int) -> Cluster | None:
    """The hosts of `--ips`. The token comes by ssh from the first, unless there is a file of it."""
    if any(not address or address.count(":") == 1 or "]:" in address for address in addresses):
        raise ConfigError(
            expected='--ips as "10.0.0.1,10.0.0.2": addresses without ports',
            found=flags.ips,
            fix="correct it; the port where hosts meet is that of --master=10.0.0.1:9988",
        )
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            expected="each host of --ips once",
            found=flags.ips,
            fix="name it once; how many processes a host has is said by --gpus or --nproc_per_node",
        )
    hosts = check_hosts([Host(address=address.strip("[]"), workers=workers) for address in addresses])
    place = own_host_index(hosts)
    number = {"--nnodes": (_host_count(flags) if flags.nnodes or flags.np else len(hosts), len(hosts))}
    number["--rank"] = (place if flags.rank in (None, -1) else flags.rank, place)
    for name, (given, found) in number.items():
        if given != found:
            raise ConfigError(
                expected=f"{name} {found}, as --ips and this host's addresses say", found=given, fix="leave it away"
            )
    if len(hosts) == 1:
        return None
    port = DEFAULT_PORT
    if flags.master:
        address, port = _master(flags.master)
        if address != hosts[0].address:
            raise ConfigError(
                expected=f"--master={hosts[0]}:PORT, the first host of --ips", found=flags.master, fix="correct it"
            )
    return Cluster(
        hosts=hosts, host_index=place, port=port, agent_start="script", is_listed=True, insecure=flags.insecure
    )


def _numbered(flags: FleetrunFlags, count: int, workers: int) -> Cluster:
    """As many hosts as `--nnodes` says, which meet at `--master`; who has its address is the first."""
    if not flags.master:
        raise ConfigError(
            expected=f"--master HOST:PORT, where {count} hosts meet",
            found="none",
            fix="name the first host, the same on all; or list them: --ips=10.0.0.1,10.0.0.2",
        )
    address, port = _master(flags.master)
    place = flags.rank
    if place in (None, -1):
        place = 0 if addresses_of(address) & own_addresses() else UNKNOWN_HOST
    elif not 0 <= place < count:
        raise ConfigError(expected=f"--rank from 0 to {count - 1}", found=place, fix="number the hosts from 0")
    return Cluster(
        hosts=numbered_hosts(address, count, workers=workers),
        host_index=place,
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
            fix="as in --master 10.0.0.1:9988" + ("; no etcd is asked here" if scheme == "etcd" else ""),
        )
    return address.strip("[]"), int(port)


def _host_count(flags: FleetrunFlags) -> int:
    text = flags.nnodes or flags.np or "1"
    least, _, most = text.partition(":")
    if not least.isdigit() or int(least) < 1 or (most and not most.isdigit()):
        raise ConfigError(expected="--nnodes as a number from 1 up", found=text, fix="one host is --nnodes 1")
    if most and most != least:
        raise ConfigError(
            expected="a number of hosts that stays: none can come or go while the job runs",
            found=f"--nnodes {text}",
            fix=f"--nnodes {most}",
        )
    return int(least)


def _require_fixed(flags: FleetrunFlags) -> None:
    if flags.elastic_server or flags.scale:
        raise ConfigError(
            expected="hosts that are named and stay: none can come or go while the job runs",
            found=f"--elastic_server={flags.elastic_server}" if flags.elastic_server else f"--scale={flags.scale}",
            fix="name the hosts: --ips=10.0.0.1,10.0.0.2, or --nnodes 2 --master 10.0.0.1:9988",
        )
