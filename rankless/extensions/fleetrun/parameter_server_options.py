"""fleetrun's options for parameter servers: numbers or addresses of servers and workers, on one host or on several."""

from collections.abc import Mapping
from dataclasses import dataclass

from rankless.config.hosts_and_addresses import Endpoint, Host, is_here, read_endpoints
from rankless.errors import ConfigError
from rankless.extensions.fleetrun.hosts import count_hosts
from rankless.extensions.fleetrun.parser import FleetrunFlags
from rankless.extensions.servers.config import RequestedServers
from rankless.extensions.servers.launch.server_hosts import find_worker_hosts, order_workers

SERVER_FLAGS = ("server_num", "servers", "worker_num", "workers", "http_port", "gloo_port")
"""As in Paddle, any one of them requests servers."""
HETEROGENEOUS_FLAGS = ("heter_worker_num", "heter_workers", "heter_devices")
COORDINATOR_FLAGS = ("coordinator_num", "coordinators")
_SERVER_RUN_MODES = ("ps", "ps-cpu", "ps-heter")
_OTHER_RUN_MODES = ("ps-gpu",)
_HETEROGENEOUS_DEVICES = (None, "", "gpu", "cpu")
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ParameterServerJob:
    """The servers and the workers that a command line names."""

    servers: RequestedServers
    workers: tuple[Endpoint, ...]
    """The endpoint of each worker, in the order of ranks; without a port it gets a free one. None if only numbers are
    given for each host."""
    worker_count: int
    """The number of workers: of each host if only numbers are given, else of all. Heterogeneous ones count."""
    heterogeneous: int = 0
    """How many of them are heterogeneous: the last ones of each host."""
    hosts: tuple[Host, ...] = ()
    """The hosts of the lists; none if all addresses are of this host."""


def read_parameter_server_job(flags: FleetrunFlags) -> ParameterServerJob | None:
    """Return the servers and workers of a command line, or None if it requests no servers.

    Raises `ConfigError` for options that contradict each other, and for features that Rankless does not have yet.
    """
    _require_supported(flags)
    given = given_server_flags(flags)
    if not given:
        return None
    servers = _read_endpoints("server", flags.server_num, flags.servers)
    workers = _read_endpoints("worker", flags.worker_num, flags.workers, may_repeat=True)
    heterogeneous = _read_heterogeneous(flags)
    host_count = count_hosts(flags)
    if not servers or not workers:
        raise ConfigError(
            expected="servers and workers, as --server_num=1 --worker_num=4, or lists of addresses by --servers and "
            "--workers",
            found=" ".join(f"{name}={value}" for name, value in given.items()),
            fix="give both; for a run without servers omit these options: one process per GPU (--gpus=0,1), or "
            "processes on the CPU (--nproc_per_node=2)",
        )
    _require_one_way(flags, len(workers))
    hosts = _find_hosts(flags, servers, workers, heterogeneous)
    is_per_host = host_count > 1 and not hosts
    has_elsewhere = bool(hosts) or not all(is_here(each.host) for each in heterogeneous)
    _require_alike(flags, has_elsewhere=has_elsewhere, is_per_host=is_per_host)
    workers, heterogeneous_count = list(order_workers(hosts, workers, heterogeneous)), len(heterogeneous)
    endpoints = () if is_per_host else tuple(map(str, servers))
    return ParameterServerJob(
        servers=RequestedServers(count=len(servers) * (host_count if is_per_host else 1), endpoints=endpoints),
        workers=() if is_per_host else tuple(workers),
        worker_count=len(workers),
        hosts=hosts,
        heterogeneous=heterogeneous_count,
    )


def _find_hosts(
    flags: FleetrunFlags, servers: list[Endpoint], workers: list[Endpoint], heterogeneous: list[Endpoint]
) -> tuple[Host, ...]:
    """Return the hosts of the lists; none if all addresses are of this host, or without a list of workers."""
    if not flags.workers:
        return ()
    return find_worker_hosts(
        "--workers",
        workers,
        servers if flags.servers else (),
        heterogeneous=heterogeneous if flags.heter_workers else (),
        heterogeneous_option="--heter_workers",
    )


def _require_alike(flags: FleetrunFlags, *, has_elsewhere: bool, is_per_host: bool) -> None:
    """Raise `ConfigError` unless all roles have lists on several hosts, or all have numbers.

    Args:
        flags: The options.
        has_elsewhere: Whether a list has addresses of another host.
        is_per_host: Whether there are several hosts, which no list names.
    """
    lists = (flags.servers, flags.workers, flags.heter_workers)
    wants_heterogeneous = flags.heter_workers or flags.heter_worker_num
    lacks_list = not flags.servers or not flags.workers or (wants_heterogeneous and not flags.heter_workers)
    if (has_elsewhere and lacks_list) or (is_per_host and any(lists)):
        given = _given(flags, (*SERVER_FLAGS, *HETEROGENEOUS_FLAGS))
        raise ConfigError(
            expected="on several hosts --servers and --workers (and --heter_workers) with the addresses of all, or "
            "--server_num and --worker_num (and --heter_worker_num) of each host",
            found=" ".join(f"{name}={value}" for name, value in given.items()),
            fix="give all as lists, or all as numbers",
        )


def _read_heterogeneous(flags: FleetrunFlags) -> list[Endpoint]:
    """Return the endpoints of heterogeneous workers. Without a list they are on this host."""
    given, number = _given(flags, HETEROGENEOUS_FLAGS), flags.heter_worker_num
    if any(";" in str(value) for value in given.values()) or flags.heter_devices not in _HETEROGENEOUS_DEVICES:
        raise ConfigError(
            expected="one stage of heterogeneous workers, on GPUs if there are any (--heter_devices=gpu) or on the CPU",
            found=" ".join(f"{name}={value}" for name, value in given.items()),
            fix="give one number, or one list of addresses: the script marks one dense part",
        )
    if number is not None and not number.isdecimal():
        raise ConfigError(expected="--heter_worker_num from 1 up", found=number, fix="correct --heter_worker_num")
    count = None if number is None else int(number)
    return _read_endpoints("heter_worker", count, flags.heter_workers, may_repeat=True)


def given_server_flags(flags: FleetrunFlags) -> Mapping[str, object]:
    """Return the given options for parameter servers under Paddle's names, with their values."""
    found = _given(flags, SERVER_FLAGS)
    return found | {"--run_mode": flags.run_mode} if flags.run_mode in _SERVER_RUN_MODES else found


def _given(flags: FleetrunFlags, names: tuple[str, ...]) -> dict[str, object]:
    values = {name: getattr(flags, name) for name in names}
    return {f"--{name}": value for name, value in values.items() if value not in (None, "")}


def _read_endpoints(role: str, count: int | None, text: str | None, *, may_repeat: bool = False) -> list[Endpoint]:
    """Return the endpoints of one role. Without a list they are on this host."""
    if not text:
        if count is not None and count < 1:
            raise ConfigError(expected=f"--{role}_num from 1 up", found=count, fix=f"correct --{role}_num")
        return [Endpoint(_ADDRESS)] * (count or 0)
    option = f"--{role}s"
    endpoints = read_endpoints(option, text, example=f"{_ADDRESS}:6170,{_ADDRESS}:6171", may_repeat=may_repeat)
    if count is not None and count != len(endpoints):
        raise ConfigError(
            expected=f"--{role}_num {len(endpoints)}, the number of addresses of {option}",
            found=count,
            fix=f"omit --{role}_num",
        )
    return endpoints


def _require_supported(flags: FleetrunFlags) -> None:
    found = _given(flags, COORDINATOR_FLAGS)
    if flags.run_mode in _OTHER_RUN_MODES:
        found["--run_mode"] = flags.run_mode
    if found:
        raise ConfigError(
            expected="servers, workers and heterogeneous workers; coordinators and tables on GPUs: not supported",
            found=" ".join(f"{name}={value}" for name, value in found.items()),
            fix="omit these options: --server_num and --worker_num, or --servers and --workers, suffice",
        )
    others = _given(flags, HETEROGENEOUS_FLAGS)
    if others and not given_server_flags(flags):
        raise ConfigError(
            expected="servers, workers and heterogeneous workers: --server_num, --worker_num and --heter_worker_num",
            found=" ".join(f"{name}={value}" for name, value in others.items()),
            fix="give all three",
        )


def _require_one_way(flags: FleetrunFlags, worker_count: int) -> None:
    """Raise `ConfigError` if options for collective training name other workers."""
    if flags.nproc_per_node not in (None, worker_count):
        raise ConfigError(
            expected="one number of workers",
            found=f"--nproc_per_node={flags.nproc_per_node} and {worker_count} workers by --worker_num or --workers",
            fix="omit --nproc_per_node",
        )
    if flags.run_mode not in (None, "", *_SERVER_RUN_MODES):
        raise ConfigError(
            expected="--run_mode=ps with options for parameter servers", found=flags.run_mode, fix="omit --run_mode"
        )
