"""torchrun's options about hosts: their number, this host's rank, and the rendezvous."""

from collections.abc import Iterator

import msgspec

from rankless.config.hosts import addresses_of, numbered_hosts, own_addresses
from rankless.config.run_config import UNKNOWN_HOST, Cluster
from rankless.errors import ConfigError
from rankless.extensions.torchrun.parser import TorchrunFlags

STATIC_PORT = 29500
RENDEZVOUS_PORT = 29400
"""torchrun's default port."""


class TorchrunHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a run, and the rendezvous of hosts and workers."""

    least: int = 1
    most: int = 1
    number: int = 0
    """This host's number."""
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free port."""
    local_address: str | None = None
    rendezvous: str = "static"
    endpoint: str = ""
    settings: tuple[tuple[str, str], ...] = ()


def make_hosts(flags: TorchrunFlags) -> TorchrunHosts:
    """Return what the options say about hosts. Raises `ConfigError` for invalid values."""
    least, most = _host_counts(flags.nnodes or "1")
    address, port = flags.master_addr or "127.0.0.1", flags.master_port
    backend = "c10d" if flags.standalone else flags.rdzv_backend or "static"
    endpoint = "" if flags.standalone else flags.rdzv_endpoint or ""
    if backend == "static" and endpoint:
        host, _, number = endpoint.rpartition(":")
        if not host or not number.isdigit():
            raise ConfigError(
                expected="--rdzv-endpoint as HOST:PORT", found=endpoint, fix="or use --master-addr and --master-port"
            )
        address, port = host, int(number)
    elif backend != "static" and most == 1:
        port = None  # torchrun also takes a free port then
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError(expected="a port from 1 to 65535", found=port, fix="choose another --master-port")
    return TorchrunHosts(
        least=least,
        most=most,
        number=flags.node_rank or 0,
        master_address=address.strip("[]"),
        master_port=port or None,
        local_address=flags.local_addr,
        rendezvous=backend,
        endpoint=endpoint,
        settings=tuple(_settings(flags.rdzv_conf or "")),
    )


def _host_counts(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if not all(number.isdigit() for number in numbers) or not 1 <= len(numbers) <= 2:
        raise ConfigError(expected="--nnodes as N or MIN:MAX", found=text, fix="one host is --nnodes 1")
    least, most = int(numbers[0]), int(numbers[-1])
    if not 0 < least <= most:
        raise ConfigError(expected="--nnodes from 1 up, MIN no more than MAX", found=text, fix="one host is --nnodes 1")
    return least, most


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise ConfigError(expected="--rdzv-conf as NAME=VALUE,NAME=VALUE", found=text, fix="correct it")
        yield name, value


def make_cluster(hosts: TorchrunHosts, *, workers: int, insecure: bool) -> Cluster | None:
    """Return the hosts, on each of which the user types the command; None for one host.

    The agents' rendezvous is at torchrun's master port. The workers get a free port of host 0. Raises `ConfigError` for
    options that contradict each other.
    """
    if hosts.most == 1:
        if hosts.number != 0:
            raise ConfigError(
                expected="--node-rank 0, the only host's number",
                found=hosts.number,
                fix="omit it, or give --nnodes",
            )
        return None
    if hosts.least != hosts.most:
        raise ConfigError(
            expected="a fixed number of hosts: none can join or leave while the job runs",
            found=f"--nnodes {hosts.least}:{hosts.most}",
            fix=f"--nnodes {hosts.most}",
        )
    if hosts.rendezvous == "static":
        address, port, host_index = hosts.master_address, hosts.master_port or STATIC_PORT, hosts.number
        if not 0 <= host_index < hosts.most:
            raise ConfigError(
                expected=f"--node-rank from 0 to {hosts.most - 1}", found=host_index, fix="number the hosts from 0"
            )
    else:
        address, _, number = hosts.endpoint.rpartition(":")
        if not number.isdigit():
            address, number = hosts.endpoint, str(RENDEZVOUS_PORT)
        if not address:
            raise ConfigError(
                expected="--rdzv-endpoint HOST:PORT, the rendezvous of the hosts",
                found=f"none, with --nnodes {hosts.most}",
                fix="name the first host, the same on every host",
            )
        port, host_index = int(number), 0 if addresses_of(address) & own_addresses() else UNKNOWN_HOST
    return Cluster(
        hosts=numbered_hosts(address, hosts.most, workers=workers),
        host_index=host_index,
        port=port,
        agent_start="manual",
        is_listed=False,
        insecure=insecure,
        join_timeout_seconds=_join_seconds(dict(hosts.settings)),
    )


def _join_seconds(settings: dict[str, str]) -> float:
    given = settings.get("join_timeout") or settings.get("timeout") or "60"
    try:
        return float(given)
    except ValueError:
        raise ConfigError(
            expected="join_timeout= in --rdzv-conf as seconds", found=given, fix="as in --rdzv-conf join_timeout=300"
        ) from None
