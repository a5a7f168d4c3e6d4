"""Options of commands that run on several hosts."""

import argparse
from collections.abc import Mapping

import msgspec

from rankless.config import environment
from rankless.config.environment import chosen_variables
from rankless.config.hosts_and_addresses import (
    DEFAULT_PORT,
    Host,
    add_heterogeneous,
    numbered_hosts,
    own_host_index,
    parse_hosts,
    read_hostfile,
    require_port,
)
from rankless.config.meaning_of_extension_options import GivenOptions, NamedWorkers, find_named_workers
from rankless.config.run_config import Cluster
from rankless.errors import ConfigError

LOG_FOLDER_HELP = "Folder for the logs of runs. Default: RANKLESS_LOG_DIR, else log."

_HOST_OPTIONS = ("hosts", "hostfile", "host_rank", "master", "host_count")
_NUMBERED = "--host-rank, --master, --host-count"


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    group = parser.add_argument_group("several hosts")
    group.add_argument(
        "--hosts", metavar="A:4,B:4", help="Hosts and their numbers of workers; A is host 0, which is this host."
    )
    group.add_argument("--hostfile", metavar="FILE", help="File with one host per line, such as `10.0.0.1 slots=4`.")
    group.add_argument("--no-ssh", action="store_true", help="Do not use ssh: you run the same command on every host.")
    group.add_argument(
        "--token-by-ssh", action="store_true", help="With --no-ssh: host 0 copies the token to the other hosts by ssh."
    )
    group.add_argument(
        "--host-rank", type=int, metavar="K", help="Without a list of hosts: number of this host, from 0."
    )
    group.add_argument("--master", metavar="A[:PORT]", help="Without a list of hosts: address of host 0.")
    group.add_argument("--host-count", type=int, metavar="M", help="Without a list of hosts: number of hosts.")
    group.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help=f"Port on which host 0 listens for the other hosts. Default: {DEFAULT_PORT}.",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="Seconds to wait for the other hosts. Default: 60.",
    )
    group.add_argument(
        "--send-script", action="store_true", help="Copy the script to hosts that have a different version."
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="With ssh: environment variable for workers of all hosts; VALUE defaults to the value here; repeatable.",
    )
    group.add_argument(
        "--insecure", action="store_true", help="Use no token: every program that reaches the port may join."
    )


def read_workers(arguments: argparse.Namespace, given: Mapping[str, GivenOptions]) -> NamedWorkers:
    """Return the workers that `-n` and the options of extensions name. Raises `ConfigError` if they contradict."""
    names_hosts = any(getattr(arguments, name, None) is not None for name in _HOST_OPTIONS)
    return find_named_workers(given, worker_count=arguments.workers, names_hosts=names_hosts)


def make_cluster(
    arguments: argparse.Namespace, worker_hosts: tuple[Host, ...] = (), *, heterogeneous: int = 0
) -> Cluster | None:
    """Return the hosts that the options name, or None for this host only.

    Args:
        arguments: The options.
        worker_hosts: The hosts of a list of workers, with their numbers of workers.
        heterogeneous: The number of heterogeneous workers on each other host that the options name.

    Raises:
        ConfigError: If the options contradict each other.
    """
    ranked = {name: getattr(arguments, name) for name in ("host_rank", "master", "host_count")}
    given = {name: value for name, value in ranked.items() if value is not None}
    methods = {
        "--hosts": arguments.hosts is not None,
        "--hostfile": arguments.hostfile is not None,
        _NUMBERED: bool(given),
        "--workers": bool(worker_hosts),
    }
    if not _has_one_method(arguments, [name for name, is_used in methods.items() if is_used]):
        return None
    if not 0 < arguments.join_timeout < 1e6:
        raise ConfigError(
            expected="--join-timeout as a number of seconds above 0", found=arguments.join_timeout, fix="choose another"
        )
    port = DEFAULT_PORT if arguments.port is None else arguments.port
    if given:
        return _make_numbered_cluster(arguments, ranked, port, heterogeneous)
    hosts = worker_hosts
    if not hosts:
        named = (
            parse_hosts(arguments.hosts, workers_per_host=arguments.workers)
            if arguments.hosts is not None
            else read_hostfile(arguments.hostfile, workers_per_host=arguments.workers)
        )
        hosts = add_heterogeneous(named, heterogeneous)
    place = own_host_index(hosts)
    if place > 0 and not arguments.no_ssh:
        raise ConfigError(
            expected=f"this command on host 0, {hosts[0]}, which starts the others by ssh",
            found=f"it on {hosts[place]}",
            fix=f"run it on {hosts[0]}, list this host first, or run the same command with --no-ssh on every host",
        )
    return _build_cluster(arguments, hosts, place, port, is_listed=True, without_ssh=arguments.no_ssh)


def keep_spares(cluster: Cluster | None, count: int) -> Cluster | None:
    """Return a cluster whose last hosts wait, until others are lost.

    Args:
        cluster: The hosts; None for this host only.
        count: How many of them wait.

    Raises:
        ConfigError: No host could be lost, none is alike, or host 0 does not start them.
    """
    if count == 0:
        return cluster
    most = 0 if cluster is None or cluster.agent_start != "ssh" else len(cluster.hosts) - 2
    if cluster is None or not 0 < count <= most:
        found = "this host only" if cluster is None else f"{len(cluster.hosts)} hosts"
        if cluster is not None and cluster.agent_start != "ssh":
            found = "a command on each host"
        raise ConfigError(
            expected="--spares with hosts that host 0 starts by ssh, of which two or more do not wait",
            found=f"--spares {count} with {found}",
            fix="name more hosts in --hosts or --hostfile, such as --hosts a:4,b:4,c:4 --spares 1, or omit --spares",
        )
    hosts, spares = cluster.hosts[:-count], cluster.hosts[-count:]
    for spare in spares:
        if all(spare.workers != host.workers for host in hosts[1:]):
            raise ConfigError(
                expected=f"a spare host with as many workers as one that it can replace: {hosts[1].workers}",
                found=f"{spare} with {spare.workers}",
                fix=f"name it {spare}:{hosts[1].workers}",
            )
    return msgspec.structs.replace(cluster, hosts=hosts, spares=spares)


def _has_one_method(arguments: argparse.Namespace, methods: list[str]) -> bool:
    """Return whether the hosts are named in some way. Raises `ConfigError` for several ways, or for `--env` besides."""
    if len(methods) > 1:
        raise ConfigError(
            expected="one way of naming the hosts", found=" and ".join(methods), fix="use only one of them"
        )
    if arguments.env and (arguments.no_ssh or _NUMBERED in methods or not methods):
        raise ConfigError(
            expected="--env with hosts that ssh starts: --hosts, --hostfile or --workers, without --no-ssh",
            found=" ".join(f"--env {item}" for item in arguments.env)
            + (" although you start each host yourself" if methods else " on this host only"),
            fix="set it in the shell in which you run the command" + (", on each host" if methods else ""),
        )
    return bool(methods)


def _make_numbered_cluster(
    arguments: argparse.Namespace, ranked: dict[str, object], port: int, heterogeneous: int
) -> Cluster:
    missing = [f"--{name.replace('_', '-')}" for name, value in ranked.items() if value is None]
    if missing:
        raise ConfigError(
            expected="--host-rank, --master and --host-count together",
            found=f"no {', no '.join(missing)}",
            fix="for example: rankless run --host-rank 1 --master 10.0.0.1:9988 --host-count 2 -n 4 train.py",
        )
    place, count = arguments.host_rank, arguments.host_count
    if count < 1 or not 0 <= place < count:
        raise ConfigError(
            expected="--host-rank from 0 to --host-count - 1",
            found=f"--host-rank {place} --host-count {count}",
            fix="number the hosts from 0; host 0 is the one that --master names",
        )
    address, _, own_port = str(arguments.master).rpartition(":")
    if not address or not own_port.isdigit():
        address, own_port = str(arguments.master), ""
    if own_port and arguments.port not in (None, int(own_port)):
        raise ConfigError(
            expected="one port", found=f"--master {arguments.master} and --port {arguments.port}", fix="omit one"
        )
    hosts = add_heterogeneous(numbered_hosts(address, count, workers=arguments.workers or 1), heterogeneous)
    return _build_cluster(arguments, hosts, place, int(own_port or port), is_listed=False, without_ssh=True)


def _build_cluster(
    arguments: argparse.Namespace, hosts: tuple[Host, ...], place: int, port: int, *, is_listed: bool, without_ssh: bool
) -> Cluster:
    require_port(port)
    return Cluster(
        hosts=hosts,
        host_index=place,
        port=port,
        agent_start=("script" if arguments.token_by_ssh else "manual") if without_ssh else "ssh",
        is_listed=is_listed,
        insecure=arguments.insecure,
        join_timeout_seconds=arguments.join_timeout,
        copies=arguments.send_script,
        variables=chosen_variables(arguments.env, environment.snapshot()),
    )
