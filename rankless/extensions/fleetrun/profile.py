"""The profile of Paddle's programs: PADDLE_ variables, endpoints, `workerlog.N` files, and the table of variables."""

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.hosts_and_addresses import Endpoint, parse_endpoint
from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.config.run_config import (
    AgreedJobConfig,
    AgreedProcesses,
    LauncherSpec,
    RunConfig,
    decode_settings,
    make_launcher_spec,
)
from rankless.extensions.fleetrun.tables import (
    HETEROGENEOUS_ENDPOINTS,
    HETEROGENEOUS_LOG_NAME,
    LOG_NAME,
    SERVER_LOG_NAME,
    format_environment_table,
    format_server_lines,
    format_worker_line,
    name_endpoint,
)
from rankless.extensions.servers.config import NAME as SERVERS
from rankless.extensions.servers.config import SERVER_ROLE, RequestedServers
from rankless.extensions.servers.launch.options import find_requested
from rankless.launch.launcher_profile import LauncherProfile, VisibleDevices, WorkerLogFiles, show_gpus
from rankless.launch.ports import reserve_master_port


class FleetrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How fleetrun runs a program."""

    job_id: str | None = None
    """None: the name of the log folder."""
    shares: tuple[tuple[int, ...], ...] = ()
    """Each worker's GPUs, as CUDA numbers those that are visible to the agent; empty on the CPU."""
    hides_gpus: bool = False
    """The user asks for the CPU, so a program that looks for GPUs must find none."""
    first_port: int | None = None
    """The first port of the endpoints; None takes free ports on one host, and 6070 on several."""
    endpoints: tuple[str, ...] = ()
    """The endpoint of each worker beside parameter servers; without a port it gets a free one."""
    heterogeneous: tuple[int, ...] = ()
    """The ranks of heterogeneous workers, on all hosts."""
    http_port: int | None = None
    """The port of PADDLE_GLOO_HTTP_ENDPOINT; None takes a free one."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """All GPUs of this host's workers, each once."""
        return tuple(dict.fromkeys(gpu for share in self.shares for gpu in share))

    def selected(self, local_rank: int) -> str | None:
        """Return a worker's GPUs as its program numbers them, among `gpus`; None on the CPU."""
        if not self.shares or not self.shares[local_rank]:
            return None
        return ",".join(str(self.gpus.index(gpu)) for gpu in self.shares[local_rank])


def make_fleetrun_spec(settings: FleetrunSettings) -> LauncherSpec:
    """Return the spec of this launcher for a `RunRequest`."""
    return make_launcher_spec("fleetrun", settings)


def share_out(gpus: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide `gpus` among `count` workers: each gets neighbours, and the first workers get one more if it is uneven.

    More workers than GPUs take them in turn.
    """
    if count >= len(gpus):
        return tuple((gpus[rank % len(gpus)],) for rank in range(count))
    size, more = divmod(len(gpus), count)
    cuts = [rank * size + min(rank, more) for rank in range(count + 1)]
    return tuple(tuple(gpus[start:end]) for start, end in itertools.pairwise(cuts))


FIRST_PORT = 6070
"""Paddle's first port of a host's endpoints. Several hosts use it because they do not tell each other of free ones."""
ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
HTTP_ENDPOINT = "PADDLE_GLOO_HTTP_ENDPOINT"
STOP_GRACE_SECONDS = 30.0
SERVER_ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST"


def make_profile(settings: bytes) -> LauncherProfile:
    """Return the profile for the settings of a `LauncherSpec`."""
    return FleetrunProfile(decode_settings(settings, FleetrunSettings))


@dataclass(frozen=True)
class FleetrunProfile(LauncherProfile):
    """How fleetrun runs a program."""

    settings: FleetrunSettings
    stop_grace_seconds = STOP_GRACE_SECONDS
    """As long as Paddle's launcher waits for its processes."""
    shows_summary = False
    """fleetrun writes none."""
    withholds_tracebacks = False
    """fleetrun shows the first worker's log file as it is."""
    plain_process_option = None
    """fleetrun has none."""
    has_private_logs = False
    """The umask of the user decides who may read them."""

    @property
    def run_name(self) -> str | None:
        """`--job_id`."""
        return self.settings.job_id

    def log_files(self, folder: str, rank: int, local_rank: int) -> WorkerLogFiles:
        """Return the path of a worker's log file, under Paddle's name."""
        return WorkerLogFiles(os.path.join(folder, self._log_name(rank)))

    def _log_name(self, rank: int) -> str:
        """Return Paddle's name of a worker's log file. Paddle numbers the workers of each kind."""
        before = sum(each < rank for each in self.settings.heterogeneous)
        if self._is_heterogeneous(rank):
            return HETEROGENEOUS_LOG_NAME.format(before)
        return LOG_NAME.format(rank - before)

    def _is_heterogeneous(self, rank: int) -> bool:
        """Return whether a worker is heterogeneous."""
        return rank in self.settings.heterogeneous

    def link_logs(
        self, folder: str, ranks: Sequence[int], start: AgreedJobConfig, *, processes: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Link `workerlog.N` and `serverlog.N` beside the run's folder to this run's.

        Links of an earlier, larger run are removed.
        """
        log_folder, run = os.path.split(folder)
        own = [SERVER_LOG_NAME.format(number) for role, number in processes if role == SERVER_ROLE]
        for name in (*map(self._log_name, ranks), *own):
            path = os.path.join(log_folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                os.replace(path, path + ".old")  # Paddle has written it: it is the user's
            link = os.path.join(log_folder, f".{name}-{secrets.token_hex(3)}")
            os.symlink(os.path.join(run, name), link)
            os.replace(link, path)
        servers = start.roles.get(SERVERS)
        heterogeneous = len(self.settings.heterogeneous)
        counts = {
            LOG_NAME.format(""): start.world_size - heterogeneous,
            SERVER_LOG_NAME.format(""): 0 if servers is None else len(servers.addresses),
            HETEROGENEOUS_LOG_NAME.format(""): heterogeneous,
        }
        for name in os.listdir(log_folder):
            path, stem, number = os.path.join(log_folder, name), *name.partition(".")[::2]
            count = counts.get(f"{stem}.")
            if os.path.islink(path) and count is not None and number.isdigit() and int(number) >= count:
                with contextlib.suppress(FileNotFoundError):  # another host on the same disk was faster
                    os.unlink(path)

    def process_log_file(self, folder: str, role: str, index: int) -> str:
        """Return the path of a log file; that of a server has Paddle's name."""
        if role != SERVER_ROLE:
            return super().process_log_file(folder, role, index)
        return os.path.join(folder, SERVER_LOG_NAME.format(index))

    def visible_devices(self, devices: Sequence[str]) -> VisibleDevices:
        """Return the devices among the GPUs of all shares; workers see no GPU at all if the user asks for the CPU."""
        found = show_gpus(devices, self.settings.gpus)
        return found._replace(cuda_variable="") if self.settings.hides_gpus and not found.cuda_variable else found

    def worker_environment(
        self, worker: WorkerConfig, start: AgreedJobConfig, *, elastic_host: str | None = None
    ) -> Mapping[str, str | None]:
        """Return Paddle's variables besides those of a plain run. The endpoints come from `open_services`."""
        rank, size, local_rank = str(worker.rank), str(worker.world_size), str(worker.local_rank)
        own = (start.launcher_variables[ENDPOINTS] or "").split(",")[worker.rank]
        address, _, port = own.rpartition(":")
        return {
            **super().worker_environment(worker, start),
            "PADDLE_TRAINER_ID": rank,
            "PADDLE_TRAINERS_NUM": size,
            "PADDLE_CURRENT_ENDPOINT": own,
            "PADDLE_MASTER": endpoint(worker.master_address, worker.master_port),
            "PADDLE_GLOBAL_RANK": rank,
            "PADDLE_GLOBAL_SIZE": size,
            "PADDLE_LOCAL_RANK": local_rank,
            "PADDLE_LOCAL_SIZE": str(worker.local_world_size),
            "PADDLE_RANK_IN_NODE": local_rank,
            "PADDLE_NNODES": str(worker.host_count),
            "PADDLE_JOB_ID": self.settings.job_id or worker.run_id,
            "PADDLE_PORT": port,
            "PADDLE_DISTRI_BACKEND": "nccl" if worker.backend == "nccl" else "gloo",
            "POD_IP": address.strip("[]"),
            "TRAINING_ROLE": "HETER_TRAINER" if self._is_heterogeneous(worker.rank) else "TRAINER",
            "FLAGS_selected_gpus": self.settings.selected(worker.local_rank),
            **self._list_heterogeneous(start),
            **({SERVER_ENDPOINTS: _list_endpoints(start.roles[SERVERS])} if SERVERS in start.roles else {}),
        }

    def _list_heterogeneous(self, start: AgreedJobConfig) -> Mapping[str, str]:
        """Return Paddle's variable with the endpoints of heterogeneous workers, if there are any."""
        if not self.settings.heterogeneous:
            return {}
        endpoints = (start.launcher_variables[ENDPOINTS] or "").split(",")
        return {HETEROGENEOUS_ENDPOINTS: ",".join(endpoints[rank] for rank in self.settings.heterogeneous)}

    def process_environment(
        self, processes: AgreedProcesses, index: int, start: AgreedJobConfig
    ) -> Mapping[str, str | None]:
        """Return Paddle's variables of a server."""
        if processes.role != SERVER_ROLE:
            return {}
        address, _, port = name_endpoint(processes.addresses[index]).rpartition(":")
        return {
            **start.launcher_variables,
            "TRAINING_ROLE": "PSERVER",
            SERVER_ENDPOINTS: _list_endpoints(processes),
            "PADDLE_PORT": port,
            "POD_IP": address.strip("[]"),
            "PADDLE_TRAINERS_NUM": str(start.world_size),
        }

    @contextlib.contextmanager
    def open_services(
        self, config: RunConfig, *, addresses: Sequence[str], worker_counts: Sequence[int], store_address: str
    ) -> Iterator[Mapping[str, str | None]]:
        """Yield every rank's endpoint, at which a script may open its own group. Rankless does not use them.

        On one host each is a free port, held until the run ends. Otherwise ports count up from the first, as in Paddle.
        """
        with contextlib.ExitStack() as stack:
            wanted = self._list_endpoints(addresses, worker_counts)
            requested = find_requested(config.request)
            if requested is not None:
                wanted.append(self._http_endpoint(requested, addresses[0]))
            is_single = len(addresses) == 1 and self.settings.first_port is None
            ports = None if is_single else _CountedPorts(self.settings.first_port or FIRST_PORT, wanted)
            found = []
            for each in wanted:
                port = each.port or (
                    stack.enter_context(reserve_master_port()).getsockname()[1] if ports is None else ports.take(each)
                )
                found.append(endpoint(each.host, port))
            http = {} if requested is None else {HTTP_ENDPOINT: found.pop()}
            yield {ENDPOINTS: ",".join(found), **http}

    def _list_endpoints(self, addresses: Sequence[str], worker_counts: Sequence[int]) -> list[Endpoint]:
        """Return each worker's endpoint, without a port if the user has given none."""
        if self.settings.endpoints:
            return list(map(parse_endpoint, self.settings.endpoints))
        hosts = zip(addresses, worker_counts, strict=True)
        return [Endpoint(address) for address, count in hosts for _ in range(count)]

    def _http_endpoint(self, requested: RequestedServers, first_address: str) -> Endpoint:
        """Return the address of the first server with `--http_port`, as in Paddle."""
        return Endpoint(parse_endpoint((*requested.endpoints, first_address)[0]).host, self.settings.http_port)

    def opening_text(
        self, config: RunConfig, lead: WorkerLaunch, start: AgreedJobConfig, *, folder: str, first_host: str
    ) -> str:
        """Return Paddle's table of the first worker's variables, and lines about this host's servers and workers."""
        table = format_environment_table(lead.environment, local_count=config.worker_count)
        servers = ""
        if SERVERS in start.roles:
            servers = format_server_lines(config, start.roles[SERVERS], lead.config.host, folder)
        logs = [self._log_name(lead.config.rank + number) for number in range(config.worker_count)]
        return table + servers + format_worker_line(config, lead.config, logs, folder=folder, first_host=first_host)


def _list_endpoints(servers: AgreedProcesses) -> str:
    count = len(servers.addresses) // (1 + servers.replicas)
    return ",".join(map(name_endpoint, servers.addresses[:count]))


def endpoint(address: str, port: int) -> str:
    """Return HOST:PORT, also for an IPv6 address."""
    return str(Endpoint(address, port))


class _CountedPorts:
    """Ports that count up on each host from the first, without those that the user has given there."""

    def __init__(self, first: int, given: Sequence[Endpoint]) -> None:
        self._first = first
        self._taken = {(each.host, each.port) for each in given}

    def take(self, wanted: Endpoint) -> int:
        """Return the next port of a host."""
        port = next(port for port in range(self._first, 2**16) if (wanted.host, port) not in self._taken)
        self._taken.add((wanted.host, port))
        return port
