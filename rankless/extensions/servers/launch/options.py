"""What `--servers`, `--workers`, `--server-mode`, `--copies` and the other options of servers mean for a run."""

import importlib.util
from collections.abc import Sequence

from rankless.config.hosts_and_addresses import Endpoint, Host, is_here, parse_endpoint, read_endpoints
from rankless.config.meaning_of_extension_options import GivenOptions, NamedWorkers, RunOptions, Settings
from rankless.config.run_config import Cluster, RunRequest
from rankless.errors import ConfigError
from rankless.extensions.servers.config import (
    DEFAULT_GEO_STEPS,
    DEFAULT_SERVER_RESTARTS,
    DEFAULT_STALENESS,
    NAME,
    SERVER_MODES,
    RequestedServers,
    ServerMode,
    find_servers,
    make_settings,
)
from rankless.extensions.servers.launch.server_hosts import (
    count_own_servers,
    find_worker_hosts,
    require_replicas,
    require_server_hosts,
)
from rankless.install_command import format_install_command
from rankless.records.number_formatting import format_count

SERVER_PACKAGES = ("numba", "zmq")
"""What the extra `ps` installs."""
_LIST = "127.0.0.1:6170,127.0.0.1:6171"


def make_options() -> "ServerOptions":
    """Return what the options of servers mean."""
    return ServerOptions()


class ServerOptions(RunOptions):
    """The options of servers. The settings of a run are a `RequestedServers` as plain values."""

    def read(self, given: GivenOptions, command: str) -> Settings:
        """See `RunOptions`. The commands plan and verify take servers in the mode `sync` alone."""
        servers = read_servers(given)
        if command != "run" and servers is not None and servers.mode != "sync":
            raise ConfigError(
                expected="--server-mode sync, in which several workers make the steps of one",
                found=servers.mode,
                fix=f"{command} the script in the mode sync; the other modes are other trainings",
            )
        if command == "plan":
            _require_one_host(given, servers)
        return {} if servers is None else make_settings(servers)

    def find_workers(self, given: GivenOptions, *, worker_count: int | None, names_hosts: bool) -> NamedWorkers:
        """See `RunOptions`: those of `--workers` and `--heter-workers`."""
        return read_workers(given, worker_count=worker_count, names_hosts=names_hosts)

    def check(self, settings: Settings, request: RunRequest, cluster: Cluster | None) -> None:
        """See `RunOptions`."""
        check_servers(find_servers(settings), request, cluster)

    def count_processes(self, settings: Settings, cluster: Cluster | None) -> int:
        """See `RunOptions`."""
        return count_own_servers(find_servers(settings), cluster)

    def explain_required_workers(self, settings: Settings) -> str:
        """See `RunOptions`. In the mode `sync` the servers have what a step needs of a lost worker."""
        mode = find_servers(settings).mode
        return "" if mode == "sync" else f"--server-mode {mode}, in which each worker has steps of its own"

    def count_row_holders(self, settings: Settings) -> int:
        """See `RunOptions`."""
        return find_servers(settings).count

    def describe(self, settings: Settings) -> str:
        """See `RunOptions`."""
        servers = find_servers(settings)
        return format_count(servers.count, "server") + (" and a copy of each" if servers.replicas else "")


def read_servers(given: GivenOptions) -> RequestedServers | None:
    """Return the servers that the options request, or None.

    Raises:
        ConfigError: For a number or an address that cannot be.
    """
    mode, text = _find_mode(given), given.get("servers")
    _require_known_mode(mode)
    staleness = _read_option(given, "--staleness", of_mode="bounded", least=0, default=DEFAULT_STALENESS)
    geo_steps = _read_option(given, "--geo-steps", of_mode="geo", least=1, default=DEFAULT_GEO_STEPS)
    restarts = given.get("server-restarts", DEFAULT_SERVER_RESTARTS)
    if restarts < 0:
        raise ConfigError(
            expected="--server-restarts as a number from 0 up", found=restarts, fix="give 0 to start no server again"
        )
    count = 0 if text is None else _read_count("--servers", text, least=0)
    settings = {
        "mode": mode,
        "staleness": staleness,
        "geo_steps": geo_steps,
        "max_restarts": restarts,
        "encrypted": given.get("encrypt-servers", False),
        "replicas": given.get("copies", 0),
    }
    if count is not None:
        if not count:
            _require_no_server_options(given)
            return None
        servers = RequestedServers(count=count, **settings)
    else:
        endpoints = _read_server_endpoints(str(text))
        servers = RequestedServers(count=len(endpoints), endpoints=tuple(map(str, endpoints)), **settings)
    require_replicas(servers)
    return servers


def read_workers(given: GivenOptions, *, worker_count: int | None, names_hosts: bool) -> NamedWorkers:
    """Return the workers that `-n`, `--workers` and `--heter-workers` name.

    Args:
        given: The options of servers.
        worker_count: The number of `-n`; None without it.
        names_hosts: Whether other options name the hosts.

    Raises:
        ConfigError: An option is no number and no list of addresses, or two of them contradict each other.
    """
    text, heterogeneous_text = given.get("workers"), given.get("heter-workers")
    count, workers = _read_count_or_list("--workers", text, least=1)
    heterogeneous, others = _read_count_or_list("--heter-workers", heterogeneous_text, least=0)
    hosts: tuple[Host, ...] = ()
    if workers:
        servers = given.get("servers")
        is_list = servers is not None and _read_count("--servers", servers, least=0) is None
        named_servers = _read_server_endpoints(str(servers)) if is_list else ()
        hosts = find_worker_hosts("--workers", workers, named_servers, heterogeneous=others)
    _require_lists(given, hosts, others, names_hosts=names_hosts)
    if text is None:
        count = worker_count
    elif worker_count not in (None, count):
        raise ConfigError(
            expected="one number of workers",
            found=f"-n {worker_count} and --workers {text}, which is {count}",
            fix="omit one of the two",
        )
    return NamedWorkers(count, heterogeneous or 0, hosts)


def _read_count_or_list(option: str, text: str | None, *, least: int) -> tuple[int | None, list[Endpoint]]:
    """Return the number of workers that an option gives, or None, and their addresses if it has a list of them."""
    count = None if text is None else _read_count(option, text, least=least)
    if text is None or count is not None:
        return count, []
    endpoints = read_endpoints(option, text, example="127.0.0.1,127.0.0.1", may_repeat=True)
    return len(endpoints), endpoints


def _require_lists(
    given: GivenOptions, hosts: tuple[Host, ...], heterogeneous: Sequence[Endpoint], *, names_hosts: bool
) -> None:
    """Raise `ConfigError` unless heterogeneous workers have the form that the other workers have on several hosts."""
    text, workers = given.get("heter-workers"), given.get("workers")
    if heterogeneous and names_hosts:
        raise ConfigError(
            expected="--heter-workers as a number, that of each host, where --workers does not list the hosts",
            found=text,
            fix="give the number, or list the hosts by --workers A,A,B --heter-workers A,B instead",
        )
    elsewhere = [each for each in heterogeneous if not hosts and not is_here(each.host)]
    if elsewhere or (hosts and text is not None and not heterogeneous and int(text) > 0):
        raise ConfigError(
            expected="on several hosts --workers and --heter-workers with one address for each worker",
            found=("" if workers is None else f"--workers {workers} ") + f"--heter-workers {text}",
            fix="list both: --workers A,A,B --heter-workers C,C",
        )


def _require_one_host(given: GivenOptions, servers: RequestedServers | None) -> None:
    """Raise `ConfigError` for addresses of other hosts."""
    endpoints = () if servers is None else servers.endpoints
    workers = read_workers(given, worker_count=None, names_hosts=False)
    if workers.hosts or any(not is_here(parse_endpoint(each).host) for each in endpoints):
        raise ConfigError(
            expected="workers and servers on this host, where the plan is found",
            found="addresses of other hosts",
            fix="give numbers: --servers 2 --workers 4",
        )


def _find_mode(given: GivenOptions) -> ServerMode:
    mode: ServerMode = given.get("server-mode", SERVER_MODES[0])
    return mode


def _read_server_endpoints(text: str) -> list[Endpoint]:
    return read_endpoints("--servers", text, example=_LIST)


def _require_no_server_options(given: GivenOptions) -> None:
    """Raise `ConfigError` if there is an option that needs servers."""
    mode = _find_mode(given)
    needing = {
        f"--server-mode {mode}": (mode != SERVER_MODES[0], "because servers hold the parameters then"),
        "--encrypt-servers": (given.get("encrypt-servers", False), "which is about messages to servers"),
    }
    for option, (is_given, reason) in needing.items():
        if is_given:
            raise ConfigError(
                expected=f"--servers with {option}, {reason}",
                found="no servers",
                fix=f"give --servers a number from 1 up, or omit {option}",
            )


def _read_option(given: GivenOptions, option: str, *, of_mode: str, least: int, default: int) -> int:
    """Return the number of an option that one mode has."""
    number, mode = given.get(option.removeprefix("--")), _find_mode(given)
    if number is None:
        return default
    if mode != of_mode or number < least:
        raise ConfigError(
            expected=f"{option} as a number from {least} up, together with --server-mode {of_mode}",
            found=f"{option} {number} --server-mode {mode}",
            fix=f"give --server-mode {of_mode}, or omit {option}" if mode != of_mode else f"give {least} or more",
        )
    return int(number)


def _read_count(option: str, text: str, *, least: int) -> int | None:
    """Return the number in `text`; None if it is a list of addresses."""
    try:
        count = int(text)
    except ValueError:
        return None
    if count < least:
        raise ConfigError(
            expected=f"{option} as a number from {least} up, or as a list of addresses",
            found=text,
            fix=f"correct {option}" + (", or omit it for a run without servers" if least == 0 else ""),
        )
    return count


def find_requested(request: RunRequest) -> RequestedServers | None:
    """Return the servers that a run requests; None for a run without."""
    settings = request.options.get(NAME)
    return None if settings is None else find_servers(settings)


def check_servers(servers: RequestedServers, request: RunRequest, cluster: Cluster | None) -> None:
    """Raise `ConfigError` for servers that no run on these hosts can have."""
    if servers.count < 1:
        raise ConfigError(expected="at least 1 server", found=servers.count, fix="give --servers a number from 1 up")
    _require_known_mode(servers.mode)
    if request.elastic is not None:
        raise ConfigError(
            expected="a fixed set of workers, because servers count the steps of every worker",
            found=f"{servers.count} servers, and workers that may join and leave",
            fix="omit the options of elastic jobs, or the servers",
        )
    has_kinds = request.heterogeneous_workers if cluster is None else cluster.heterogeneous_workers
    if has_kinds and servers.mode != "sync":
        raise ConfigError(
            expected="heterogeneous workers in the mode sync, without --mesh and --plan",
            found=f"--server-mode {servers.mode}",
            fix="omit it, or omit --heter-workers",
        )
    require_replicas(servers)
    require_server_hosts(servers, cluster)
    require_server_packages()


def _require_known_mode(mode: str) -> None:
    if mode not in SERVER_MODES:
        raise ConfigError(
            expected=f"--server-mode {', '.join(SERVER_MODES)}",
            found=mode,
            fix="give one of these",
        )


def require_server_packages() -> None:
    """Raise `ConfigError` unless the packages are installed that servers need."""
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            expected=f"the packages that parameter servers need: {', '.join(SERVER_PACKAGES)}",
            found=f"no {' and no '.join(missing)}",
            fix=format_install_command("ps"),
        )
