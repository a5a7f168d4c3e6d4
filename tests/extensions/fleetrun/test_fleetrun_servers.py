"""fleetrun's options for parameter servers, and what they become, without running anything."""

import dataclasses

import msgspec
import pytest

from rankless.cli import CommandParser, main
from rankless.config import hosts_and_addresses, make_run_config
from rankless.config.process_configs import WorkerLaunch
from rankless.config.run_config import AgreedJobConfig, AgreedProcesses, Program, RunConfig
from rankless.errors import ConfigError
from rankless.extensions.fleetrun import command as fleetrun
from rankless.extensions.fleetrun.parameter_server_options import COORDINATOR_FLAGS, SERVER_FLAGS
from rankless.extensions.fleetrun.parser import read_flags
from rankless.extensions.fleetrun.run_config import fleetrun_request
from rankless.extensions.fleetrun.tables import format_environment_table, format_server_lines
from rankless.extensions.servers.config import RequestedServers, ServersConfig
from rankless.extensions.servers.launch import server_hosts
from rankless.extensions.servers.launch.options import find_requested
from rankless.extensions.servers.launch.server_process import make_server_launches
from rankless.launch.extension_process_role import WorkerContent
from rankless.launch.launcher_profile import load_profile
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.worker_configs import make_worker_configs

SCRIPT = Program(kind="script", target=__file__)


def config_of(*words: str) -> RunConfig:
    parser = CommandParser(prog="rankless", allow_abbrev=fleetrun.ABBREVIATES)
    fleetrun.add_arguments(parser)
    flags = read_flags(parser.parse_args([*words, "train.py"]))
    return make_run_config.make_run_config(SCRIPT, fleetrun_request(flags, SCRIPT))


def job_of(config: RunConfig, *addresses: str) -> ReadyJob:
    """Return a job whose servers have these addresses, with the variables of its profile's services."""
    start = AgreedJobConfig(
        run_id="run",
        seed=None,
        workers=(config.worker_count,),
        backend="gloo",
        master_address="127.0.0.1",
        master_port=29500,
        store_address="127.0.0.1",
        store_port=1,
    )
    services = load_profile(config.request.launcher).open_services(
        config, addresses=["127.0.0.1"], worker_counts=[config.worker_count], store_address="127.0.0.1"
    )
    with services as variables:
        start = msgspec.structs.replace(start, launcher_variables=variables)
    agreed = AgreedProcesses(
        addresses=tuple(f"tcp://{each}" for each in addresses), hosts=(0,) * len(addresses), role="server"
    )
    start = msgspec.structs.replace(start, roles={"servers": agreed})
    return ReadyJob(
        peers=Peers(), start=start, profile=load_profile(config.request.launcher), devices=(config.devices,)
    )


def servers_in(config: RunConfig) -> RequestedServers:
    found = find_requested(config.request)
    assert found is not None
    return found


def servers_of(job: ReadyJob) -> ServersConfig:
    return ServersConfig(addresses=job.start.roles["servers"].addresses, token="secret")


def workers_of(config: RunConfig, job: ReadyJob) -> list[WorkerLaunch]:
    content = WorkerContent(roles={"servers": msgspec.to_builtins(servers_of(job))})
    return make_worker_configs(config, job, folder="log/run", content=content)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Lets this host have some number of GPUs, of which CUDA_VISIBLE_DEVICES shows some."""

    def have(count: int, visible: str) -> None:
        files = [f"/dev/nvidia{number}" for number in range(count)]
        monkeypatch.setattr(make_run_config.glob, "glob", lambda _pattern: files)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


LINES = [
    ("--server_num=1 --worker_num=4", 1, 4),
    ("--server_num 2 --trainer_num 3", 2, 3),
    ("--server-num=2 --worker-num=2 --run_mode=ps", 2, 2),
    ("--servers=127.0.0.1:6170,localhost:6171 --workers=127.0.0.1,127.0.0.1,localhost", 2, 3),
    ("--servers=127.0.0.1:6170 --workers=127.0.0.1:6172,127.0.0.1:6173 --http_port=9000", 1, 2),
    ("--servers=127.0.0.1 --server_num=1 --worker_num=2 --nproc_per_node=2", 1, 2),
]


@pytest.mark.parametrize(("line", "servers", "workers"), LINES)
def test_numbers_and_lists_name_servers_and_workers(line: str, servers: int, workers: int):
    config = config_of(*line.split())
    assert (servers_in(config).count, len(servers_in(config).endpoints), config.worker_count) == (
        servers,
        servers,
        workers,
    )


GPU_LINES = [
    # GPUs, CUDA_VISIBLE_DEVICES, servers and workers: each worker's FLAGS_selected_gpus
    (8, "0,1,2,3", "--server_num=2 --worker_num=4", ["0", "1", "2", "3"]),
    (8, "0", "--server_num=2 --worker_num=2", ["0", "0"]),
    (8, "0,1,2,3", "--server_num=1 --worker_num=2", ["0", "1"]),
    (8, "0,1", "--servers=127.0.0.1:6170 --workers=127.0.0.1:6172,127.0.0.1:6173,127.0.0.1", ["0", "1", "0"]),
]


@pytest.mark.parametrize(("present", "visible", "line", "selected"), GPU_LINES)
def test_workers_take_gpus_one_each_and_servers_none(present, visible, line, selected, gpus):
    gpus(present, visible)
    config = config_of(*line.split())
    workers = workers_of(config, job_of(config, "127.0.0.1:6170"))
    assert [each.environment["FLAGS_selected_gpus"] for each in workers] == selected


def test_every_role_gets_paddles_variables():
    config = config_of("--servers=127.0.0.1:6170,127.0.0.1:6171", "--workers=127.0.0.1:6172,127.0.0.1")
    job = job_of(config, "127.0.0.1:6170", "127.0.0.1:6171")
    servers = make_server_launches(job.profile, job.start, servers_of(job), folder="log/run")
    workers = workers_of(config, job)
    common = {"PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6170,127.0.0.1:6171", "PADDLE_TRAINERS_NUM": "2"}
    own = [
        (servers[1].variables, {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": "6171", "POD_IP": "127.0.0.1"}),
        (workers[0].environment, {"TRAINING_ROLE": "TRAINER", "PADDLE_PORT": "6172", "PADDLE_TRAINER_ID": "0"}),
    ]
    for variables, expected in own:
        assert {name: variables.get(name) for name in (*common, *expected)} == common | expected
        first, second = str(variables["PADDLE_TRAINER_ENDPOINTS"]).split(",")
        assert (first, second.partition(":")[0]) == ("127.0.0.1:6172", "127.0.0.1")
        assert 0 < int(second.partition(":")[2]) < 2**16
        assert str(variables["PADDLE_GLOO_HTTP_ENDPOINT"]).startswith("127.0.0.1:")
    assert [each.log_file.rpartition("/")[2] for each in servers] == ["serverlog.0", "serverlog.1"]


def test_the_http_port_stands_in_the_variable_of_its_endpoint():
    config = config_of("--server_num=1", "--worker_num=1", "--http_port=9000")
    job = job_of(config, "127.0.0.1:6170")
    environment = workers_of(config, job)[0].environment
    assert environment["PADDLE_GLOO_HTTP_ENDPOINT"] == "127.0.0.1:9000"


def test_the_tables_show_the_servers():
    config = config_of("--server_num=2", "--worker_num=1")
    job = job_of(config, "127.0.0.1:6170", "127.0.0.1:6171")
    lead = workers_of(config, job)[0]
    box = format_environment_table(lead.environment, local_count=1)
    rows = [line.strip(" |").split() for line in box.splitlines()]
    assert ["TRAINING_ROLE", "TRAINER"] in rows
    assert ["PADDLE_PSERVERS_IP_PORT_LIST", "127.0.0.1:6170"] in rows
    line = format_server_lines(config, job.start.roles["servers"], 0, "log/run")
    assert "2 servers on the CPU at 127.0.0.1:6170, 127.0.0.1:6171" in line
    assert "log/serverlog.0 to serverlog.1" in line
    assert "secret" not in box + line


@pytest.fixture
def host_yy(monkeypatch: pytest.MonkeyPatch):
    """Give this host the address 198.51.100.8."""
    for module in (hosts_and_addresses, server_hosts):
        monkeypatch.setattr(module, "own_addresses", lambda: frozenset({"198.51.100.8", "127.0.0.1"}))


ON_HOSTS = [
    ("xx,xx,xx,xx,yy,yy,yy,yy", [f"{host}:{port}" for host in ("xx", "yy") for port in range(6070, 6074)]),
    (
        "xx:6172,xx:6173,xx:6174,xx:6175,yy:6176,yy:6177,yy:6178,yy:6179",
        [f"{'xx' if port < 6176 else 'yy'}:{port}" for port in range(6172, 6180)],
    ),
    ("xx:6071,xx,xx,yy,yy", ["xx:6071", "xx:6070", "xx:6072", "yy:6070", "yy:6071"]),
]


@pytest.mark.usefixtures("host_yy")
@pytest.mark.parametrize(("workers", "wanted"), ON_HOSTS)
def test_lists_of_several_hosts_give_each_host_its_part(workers: str, wanted: list[str], gpus):
    def named(text: str) -> str:
        return text.replace("xx", "198.51.100.7").replace("yy", "198.51.100.8")

    gpus(8, "0,1,2,3,4,5,6,7")
    config = config_of(named("--servers=xx:6170,yy:6171"), named(f"--workers={workers}"))
    assert config.cluster is not None
    counts = [workers.count("xx"), workers.count("yy")]
    assert ([host.workers for host in config.cluster.hosts], config.cluster.host_index) == (counts, 1)
    assert (config.cluster.agent_start, config.worker_count, servers_in(config).count) == ("script", counts[1], 2)
    assert config.devices == tuple(f"cuda:{number}" for number in range(counts[1]))
    services = load_profile(config.request.launcher).open_services(
        config, addresses=named("xx,yy").split(","), worker_counts=counts, store_address=named("xx")
    )
    with services as variables:
        assert variables["PADDLE_TRAINER_ENDPOINTS"] == named(",".join(wanted))
        assert str(variables["PADDLE_GLOO_HTTP_ENDPOINT"]).startswith(named("xx:"))


def test_numbers_are_those_of_each_host():
    config = config_of("--server_num=2", "--worker_num=3", "--nnodes=2", "--master=127.0.0.1:9988", "--rank=1")
    assert config.cluster is not None
    assert ([host.workers for host in config.cluster.hosts], config.worker_count) == ([3, 3], 3)
    assert (servers_in(config).count, servers_in(config).endpoints) == (4, ())


CONTRADICTIONS = [
    *((f"--{name}=2", "expected: servers and workers") for name in SERVER_FLAGS if not name.endswith("s")),
    ("--servers=127.0.0.1:6170", "expected: servers and workers"),
    ("--run_mode=ps", "expected: servers and workers"),
    ("--server_num=0 --worker_num=2", "expected: --server_num from 1 up"),
    ("--server_num=2 --worker_num=-1", "expected: --worker_num from 1 up"),
    ("--server_num=2 --worker_num=2 --nproc_per_node=3", "expected: one number of workers"),
    ("--server_num=2 --worker_num=2 --run_mode=collective", "expected: --run_mode=ps"),
    ("--server_num=2 --servers=127.0.0.1:6170 --worker_num=1", "expected: --server_num 1"),
    ("--servers=127.0.0.1:6170,127.0.0.1:6170 --worker_num=1", "expected: each address of --servers once"),
    ("--servers=127.0.0.1:99999 --worker_num=1", "expected: --servers as a number, or as a list"),
    ("--servers=198.51.100.7:6170 --workers=198.51.100.7,198.51.100.7", "this host among 198.51.100.7"),
    ("--servers=198.51.100.7:6170 --workers=127.0.0.1", "127.0.0.1, which every host has for itself"),
    ("--servers=127.0.0.1:6170 --workers=127.0.0.1,198.51.100.7", "127.0.0.1, which every host has for itself"),
    ("--servers=198.51.100.7 --workers=198.51.100.7,198.51.100.8,198.51.100.7", "side by side"),
    ("--server_num=1 --workers=198.51.100.7,198.51.100.8", "give all as lists, or all as numbers"),
    ("--servers=127.0.0.1 --worker_num=2 --nnodes=2 --master=127.0.0.1:9988", "give all as lists, or all as numbers"),
]


@pytest.mark.parametrize(("line", "message"), CONTRADICTIONS)
def test_contradictions_are_refused_with_a_remedy(line: str, message: str):
    with pytest.raises(ConfigError) as error:
        config_of(*line.split())
    assert message in str(error.value)


HETEROGENEOUS = [
    ("--server_num=1 --worker_num=2 --heter_worker_num=2", ["127.0.0.1"] * 4),
    (
        "--servers=127.0.0.1:6170 --workers=127.0.0.1:6171,127.0.0.1 "
        "--heter_workers=127.0.0.1:6172,127.0.0.1:6173 --run_mode=ps-heter --heter_devices=gpu",
        ["127.0.0.1:6171", "127.0.0.1", "127.0.0.1:6172", "127.0.0.1:6173"],
    ),
]


@pytest.mark.parametrize(("line", "endpoints"), HETEROGENEOUS)
def test_heterogeneous_workers_take_the_gpus_and_have_paddles_names(line: str, endpoints: list[str], gpus):
    gpus(2, "0,1")
    config = config_of(*line.split())
    assert config.devices == ("cpu", "cpu", "cuda:0", "cuda:1")
    assert config.mesh[0].stage_workers == ((0, 1), (2, 3))
    workers = workers_of(config, job_of(config, "127.0.0.1:6170"))
    environments = [worker.environment for worker in workers]
    found = str(environments[0]["PADDLE_TRAINER_ENDPOINTS"]).split(",")
    assert all(each.startswith(wanted) for each, wanted in zip(found, endpoints, strict=True))
    assert [each["TRAINING_ROLE"] for each in environments] == ["TRAINER"] * 2 + ["HETER_TRAINER"] * 2
    assert environments[0]["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"] == ",".join(found[2:])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["", "", "0,1", "0,1"]
    assert [each["FLAGS_selected_gpus"] for each in environments] == [None, None, "0", "1"]
    names = [worker.config.log_file.rpartition("/")[2] for worker in workers]
    assert names == ["workerlog.0", "workerlog.1", "heterlog.0", "heterlog.1"]


HETEROGENEOUS_ON_HOSTS = [
    # workers, heterogeneous workers, the counts of each host, the endpoints, the ranks of heterogeneous workers
    (
        "xx,xx",
        "yy,yy:6070",
        [(2, 0), (2, 2)],
        ["xx:6070", "xx:6071", "yy:6071", "yy:6070"],
        (2, 3),
    ),
    (
        "xx:6172,yy,yy",
        "xx:6180,yy",
        [(2, 1), (3, 1)],
        ["xx:6172", "xx:6180", "yy:6070", "yy:6071", "yy:6072"],
        (1, 4),
    ),
    (
        "yy",
        "xx,xx",
        [(1, 0), (2, 2)],
        ["yy:6070", "xx:6070", "xx:6071"],
        (1, 2),
    ),
]


@pytest.mark.usefixtures("host_yy")
@pytest.mark.parametrize(("workers", "others", "counts", "endpoints", "ranks"), HETEROGENEOUS_ON_HOSTS)
def test_lists_of_several_hosts_place_heterogeneous_workers(workers, others, counts, endpoints, ranks, gpus):
    def named(text: str) -> str:
        return text.replace("xx", "198.51.100.7").replace("yy", "198.51.100.8")

    gpus(2, "0,1")
    config = config_of(named("--servers=xx:6170"), named(f"--workers={workers}"), named(f"--heter_workers={others}"))
    assert config.cluster is not None
    assert [(host.workers, host.heterogeneous) for host in config.cluster.hosts[:2]] == counts
    assert config.mesh[0].stage_workers[1] == ranks
    names = [host.address for host in config.cluster.hosts]
    own = names.index("198.51.100.8")
    first, (count, heterogeneous) = sum(count for count, _ in counts[:own]), counts[own]
    assert config.devices == ("cpu",) * (count - heterogeneous) + ("cuda:0", "cuda:1")[:heterogeneous]
    profile = load_profile(config.request.launcher)
    with profile.open_services(
        config, addresses=names, worker_counts=[each for each, _ in counts], store_address=names[0]
    ) as variables:
        job = job_of(config)
        start = msgspec.structs.replace(
            job.start, workers=tuple(each for each, _ in counts), launcher_variables=variables, mesh=config.mesh
        )
        ready = dataclasses.replace(job, start=start, host_index=own)
        launches = workers_of(config, ready)
    for number, launch in enumerate(launches):
        rank, environment = first + number, launch.environment
        assert environment["PADDLE_TRAINER_ENDPOINTS"] == named(",".join(endpoints))
        listed = ",".join(endpoints[each] for each in ranks)
        assert environment["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"] == named(listed)
        assert environment["PADDLE_CURRENT_ENDPOINT"] == named(endpoints[rank])
        assert environment["TRAINING_ROLE"] == ("HETER_TRAINER" if rank in ranks else "TRAINER")
        kind = [each for each in range(len(endpoints)) if (each in ranks) == (rank in ranks)]
        name = f"{'heterlog' if rank in ranks else 'workerlog'}.{kind.index(rank)}"
        assert launch.config.log_file.endswith(f"/{name}")


def test_numbers_of_heterogeneous_workers_are_those_of_each_host(gpus):
    gpus(0, "")
    line = "--server_num=1 --worker_num=2 --heter_worker_num=1 --nnodes=2 --master=127.0.0.1:9988 --rank=1"
    config = config_of(*line.split())
    assert config.cluster is not None
    assert [(host.workers, host.heterogeneous) for host in config.cluster.hosts] == [(3, 1), (3, 1)]
    assert config.mesh[0].stage_workers == ((0, 1, 3, 4), (2, 5))
    listed = config_of(*line.replace("--nnodes=2 --master=127.0.0.1:9988", "--ips=127.0.0.1,198.51.100.7")[:-9].split())
    assert listed.mesh == config.mesh
    profile = load_profile(config.request.launcher)
    names = [profile.log_files("", rank, rank % 3).output for rank in range(6)]
    assert names == ["workerlog.0", "workerlog.1", "heterlog.0", "workerlog.2", "workerlog.3", "heterlog.1"]


def test_heterogeneous_workers_can_be_on_the_cpu(gpus):
    gpus(2, "0,1")
    config = config_of("--server_num=1", "--worker_num=1", "--heter_worker_num=1", "--heter_devices=cpu")
    assert config.devices == ("cpu", "cpu")


REFUSED_HETEROGENEOUS = [
    ("--heter_worker_num=2", "give all three"),
    ("--server_num=1 --worker_num=1 --heter_worker_num=2;1", "one stage of heterogeneous workers"),
    ("--server_num=1 --worker_num=1 --heter_worker_num=x", "--heter_worker_num from 1 up"),
    ("--server_num=1 --worker_num=1 --heter_worker_num=0", "--heter_worker_num from 1 up"),
    ("--server_num=1 --worker_num=1 --heter_worker_num=1 --heter_devices=xpu", "one stage of heterogeneous workers"),
    ("--server_num=1 --worker_num=1 --heter_workers=198.51.100.7", "give all as lists, or all as numbers"),
    (
        "--servers=198.51.100.8 --workers=198.51.100.8 --heter_workers=198.51.100.7,198.51.100.8",
        "reorder them: --heter_workers=198.51.100.8,198.51.100.7",
    ),
    (
        "--servers=198.51.100.8 --workers=198.51.100.8,198.51.100.7 --heter_worker_num=1",
        "give all as lists, or all as numbers",
    ),
    ("--server_num=1 --workers=198.51.100.8 --heter_workers=198.51.100.7", "give all as lists, or all as numbers"),
    ("--servers=198.51.100.8 --worker_num=1 --heter_workers=198.51.100.7", "give all as lists, or all as numbers"),
    (
        "--server_num=1 --worker_num=1 --heter_workers=127.0.0.1 --nnodes=2 --master=127.0.0.1:9988",
        "give all as lists, or all as numbers",
    ),
    ("--servers=198.51.100.8 --workers=198.51.100.7 --heter_workers=127.0.0.1", "which every host has for itself"),
]


@pytest.mark.usefixtures("host_yy")
@pytest.mark.parametrize(("line", "message"), REFUSED_HETEROGENEOUS)
def test_heterogeneous_workers_that_cannot_be_are_refused(line: str, message: str):
    with pytest.raises(ConfigError) as error:
        config_of(*line.split())
    assert message in str(error.value)


@pytest.mark.parametrize("line", [*(f"--{name}=2" for name in COORDINATOR_FLAGS), "--run_mode=ps-gpu"])
def test_coordinators_and_tables_on_gpus_are_refused_by_name(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["fleetrun", "--server_num=1", "--worker_num=1", line, __file__]) == 2
    messages = capsys.readouterr().err
    assert "coordinators and tables on GPUs: not supported" in messages
    assert f"found:    {line}\n" in messages
