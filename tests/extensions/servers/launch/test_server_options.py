"""`--servers`, `--workers`, `--server-mode` and `--server-restarts` of `rankless run` and `rankless verify`."""

import re
from pathlib import Path

import pytest
from support.servers import install_server
from support.warm_runs import rankless

from rankless.cli import main
from rankless.config import hosts_and_addresses, make_run_config
from rankless.config.extensions import find_extension
from rankless.config.hosts_and_addresses import Endpoint, parse_endpoint
from rankless.config.run_config import Elastic, Program, RunConfig, RunRequest
from rankless.errors import ConfigError
from rankless.extensions.servers.config import NAME, SERVER_MODES, SERVER_ROLE, RequestedServers, make_settings
from rankless.extensions.servers.launch import options as server_options
from rankless.extensions.servers.launch import server_hosts
from rankless.extensions.servers.launch.options import find_requested
from rankless.launch import agent


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The runs that a command line starts, none of which runs."""
    configs: list[RunConfig] = []

    def run(config: RunConfig, **_: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(agent, "run", run)
    return configs


LISTS = ("--servers", "127.0.0.1:6170,localhost", "--workers", "127.0.0.1,127.0.0.1:6172,127.0.0.1")
ACCEPTED = [
    (("--servers", "2", "--workers", "3"), 2, (), 3),
    (("--servers", "2", "-n", "3", "--workers", "3", "--server-mode", "sync"), 2, (), 3),
    (("--servers", "2", "-n", "3"), 2, (), 3),
    (("--servers", "2"), 2, (), 1),
    (("--servers", "1", "--mesh", "data=2"), 1, (), 2),
    (LISTS, 2, ("127.0.0.1:6170", "localhost"), 3),
]


@pytest.mark.parametrize(("options", "servers", "endpoints", "workers"), ACCEPTED)
def test_numbers_and_lists_name_servers_and_workers(options, servers, endpoints, workers, started):
    assert main(["run", *options, "--devices", "cpu", __file__]) == 0
    assert find_requested(started[0].request) == RequestedServers(count=servers, endpoints=endpoints)
    assert started[0].worker_count == workers


@pytest.mark.parametrize("heterogeneous", ["2", "127.0.0.1,127.0.0.1:6180"])
def test_heterogeneous_workers_come_after_the_others(heterogeneous, started: list[RunConfig]):
    assert main(["run", "--servers", "2", "--workers", "3", "--heter-workers", heterogeneous, __file__]) == 0
    (axis,) = started[0].mesh
    assert (axis.name, axis.size, axis.stage_workers) == ("pipeline", 5, ((0, 1, 2), (3, 4)))
    assert started[0].worker_count == 5
    assert started[0].devices == ("cpu",) * 5


@pytest.fixture
def host_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this host the address 198.51.100.7."""
    for module in (hosts_and_addresses, server_hosts):
        monkeypatch.setattr(module, "own_addresses", lambda: frozenset({"198.51.100.7", "127.0.0.1"}))


ON_HOSTS = [
    # --workers and --heter-workers, or other options; workers and heterogeneous ones of each host; stage_workers
    ("--workers 7,7,8 --heter-workers 9,9", [(2, 0), (1, 0), (2, 2)], ((0, 1, 2), (3, 4))),
    ("--workers 7,7,8 --heter-workers 8:6180,9", [(2, 0), (2, 1), (1, 1)], ((0, 1, 2), (3, 4))),
    ("--workers 7,8,8 --heter-workers 7,7,8", [(3, 2), (3, 1)], ((0, 3, 4), (1, 2, 5))),
    ("--workers 7 --heter-workers 8 --servers 9:6170", [(1, 0), (1, 1), (0, 0)], ((0,), (1,))),
    ("--hosts 7:2,8:1 --heter-workers 1", [(3, 1), (2, 1)], ((0, 1, 3), (2, 4))),
    ("--master 7 --host-rank 0 --host-count 2 -n 2 --heter-workers 1", [(3, 1), (3, 1)], ((0, 1, 3, 4), (2, 5))),
    ("--hosts 7:2 --heter-workers 2", None, ((0, 1), (2, 3))),
    ("--workers 127.0.0.1,7 --heter-workers 7,localhost", None, ((0, 1), (2, 3))),
]


def on_network(text: str) -> list[str]:
    """Return options with the hosts 7, 8 and 9 as addresses."""
    return re.sub(r"(?<=[ ,])([789])(?=[,: ]|$)", r"198.51.100.\1", text).split()


@pytest.mark.usefixtures("host_7")
@pytest.mark.parametrize(("options", "counts", "kinds"), ON_HOSTS)
def test_heterogeneous_workers_have_the_last_ranks_of_their_hosts(options, counts, kinds, started, monkeypatch):
    monkeypatch.setattr(make_run_config, "count_gpus", lambda: 8)
    assert main(["run", *on_network(options), "--no-ssh", __file__]) == 0
    (config,) = started
    (axis,) = config.mesh
    assert (axis.size, axis.stage_workers) == (sum(map(len, kinds)), kinds)
    found = None if config.cluster is None else [(each.workers, each.heterogeneous) for each in config.cluster.hosts]
    assert found == counts
    own, gpus = counts[0] if counts else (4, 2)
    assert config.devices == ("cpu",) * (own - gpus) + tuple(f"cuda:{number}" for number in range(gpus))
    assert (config.worker_count, config.request.heterogeneous_workers) == (own, gpus)


REFUSED_ON_HOSTS = [
    ("--workers 7,8 --heter-workers 8,7", "fix:      reorder them: --heter-workers=198.51.100.7,198.51.100.8"),
    ("--workers 7,8 --heter-workers 9,8", "--heter-workers=198.51.100.8,198.51.100.9"),
    ("--workers 7,8,8 --heter-workers 9,7:1,9", "--heter-workers=198.51.100.7:1,198.51.100.9,198.51.100.9"),
    ("--workers 7,8 --heter-workers 127.0.0.1", "127.0.0.1, which every host has for itself"),
    ("--workers 127.0.0.1 --heter-workers 8", "127.0.0.1, which every host has for itself"),
    ("--workers 7,8 --heter-workers 1", "fix:      list both: --workers A,A,B --heter-workers C,C"),
    ("--workers 2 --heter-workers 8", "found:    --workers 2 --heter-workers 198.51.100.8"),
    ("--heter-workers 8,8", "found:    --heter-workers 198.51.100.8,198.51.100.8"),
    ("--hosts 7:1,8:1 --heter-workers 7,8", "expected: --heter-workers as a number, that of each host"),
    ("--workers 7,8 --heter-workers 9 --mesh data=3", "found:    --mesh"),
    ("--workers 7,8 --heter-workers 9 --servers 7 --server-mode geo", "geo\n"),
    ("--workers 8 --heter-workers 9", "expected: this host among 198.51.100.8, 198.51.100.9"),
]


@pytest.mark.usefixtures("host_7")
@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(("options", "message"), REFUSED_ON_HOSTS)
def test_heterogeneous_workers_that_hosts_cannot_have_are_refused(command, options, message, started, capsys):
    assert main([command, *on_network(options), __file__]) == 2
    assert message in capsys.readouterr().err
    assert not started


REFUSED_HETEROGENEOUS = [
    (("--heter-workers", "-1"), "--heter-workers as a number from 0 up"),
    (("--heter-workers", "x,,y"), "--heter-workers as a number, or as a list"),
    (("--heter-workers", "198.51.100.7"), "on several hosts --workers and --heter-workers with one address for each"),
    (("--heter-workers", "1", "--mesh", "data=2"), "--mesh"),
    (("--heter-workers", "1", "--servers", "1", "--server-mode", "async"), "async"),
    (("--heter-workers", "1", "--hosts", "127.0.0.1:0,198.51.100.7"), "a number of workers from 1 up"),
]


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(("options", "message"), REFUSED_HETEROGENEOUS)
def test_heterogeneous_workers_that_cannot_be_are_refused(command, options, message, started, capsys):
    assert main([command, *options, __file__]) == 2
    assert message in capsys.readouterr().err
    assert not started


def test_a_mode_with_steps_of_each_worker_loses_none(started, capsys):
    options = ("--servers", "1", "--workers", "2", "--min-workers", "1", __file__)
    assert main(["run", "--server-mode", "async", *options]) == 2
    assert "found:    --server-mode async, in which each worker has steps of its own" in capsys.readouterr().err
    assert main(["run", *options]) == 0
    assert len(started) == 1


@pytest.mark.parametrize("servers", ["2", "127.0.0.1,127.0.0.1"])
@pytest.mark.parametrize(("options", "restarts"), [((), 10), (("--server-restarts", "0"), 0)])
def test_the_number_of_restarts_of_servers_has_a_limit(servers, options, restarts, started: list[RunConfig]):
    assert main(["run", "--servers", servers, *options, "--devices", "cpu", __file__]) == 0
    assert started[0].request.options[NAME]["max_restarts"] == restarts


@pytest.mark.parametrize(
    ("options", "workers"), [(("--workers", "3"), 3), (("--servers", "0", "--workers", "2"), 2), ((), 1)]
)
def test_without_servers_workers_are_those_of_n(options: tuple[str, ...], workers: int, started: list[RunConfig]):
    assert main(["run", *options, "--devices", "cpu", __file__]) == 0
    assert (started[0].request.options, started[0].worker_count) == ({}, workers)


REFUSED = [
    (("--servers", "-1"), "expected: --servers as a number from 0 up, or as a list of addresses\nfound:    -1"),
    (("--servers", ""), "expected: --servers as a number, or as a list of addresses"),
    (("--servers", "1", "--workers", "0"), "expected: --workers as a number from 1 up"),
    (("--servers", "a b"), "expected: --servers as a number, or as a list of addresses"),
    (("--servers", "127.0.0.1:0"), "ports are numbers from 1 to 65535"),
    (("--servers", "127.0.0.1:6170,127.0.0.1:6170"), "expected: each address of --servers once"),
    (("--servers", "198.51.100.7:6170"), "found:    198.51.100.7, which is not this host"),
    (("--servers", "1", "--workers", "127.0.0.1,198.51.100.7"), "127.0.0.1, which every host has for itself"),
    (("-n", "2", "--workers", "3"), "found:    -n 2 and --workers 3, which is 3"),
    (("--servers", "1", "--server-mode", "half"), "expected: --server-mode sync, async, bounded, geo"),
    (("--servers", "1", "--server-mode", "geo", "--geo-steps", "0"), "fix:      give 1 or more"),
    (("--servers", "1", "--server-mode", "async", "--geo-steps", "3"), "found:    --geo-steps 3 --server-mode async"),
    (("--server-mode", "async"), "expected: --servers with --server-mode async"),
    (("--servers", "0", "--server-mode", "bounded"), "found:    no servers"),
    (("--encrypt-servers",), "expected: --servers with --encrypt-servers"),
    (
        ("--servers", "2", "--encrypt-servers", "--hosts", "127.0.0.1,198.51.100.7", "--no-ssh", "--insecure"),
        "found:    --insecure",
    ),
    (("--servers", "1", "--staleness", "3"), "found:    --staleness 3 --server-mode sync"),
    (("--servers", "1", "--server-mode", "bounded", "--staleness", "-1"), "fix:      give 0 or more"),
    (("--servers", "1", "--server-restarts", "-1"), "expected: --server-restarts as a number from 0 up"),
    (("--servers", "1", "--copies", "2"), "expected: --copies 0 or 1"),
    (("--servers", "1", "--copies", "-1"), "found:    -1"),
    (
        ("--servers", "127.0.0.1:6170,127.0.0.1:6171", "--copies", "1"),
        "found:    127.0.0.1:6170, 127.0.0.1:6171, on one host",
    ),
    (("--servers", "127.0.0.1,localhost", "--copies", "1"), "found:    127.0.0.1, localhost, on one host"),
    (
        ("--servers", "198.51.100.7:1", "--workers", "198.51.100.8", "--copies", "1"),
        "fix:      add a server on another host; --servers 1 puts copies on this host, too",
    ),
    (("--servers", "1", "--workers", "3", "--mesh", "data=2"), "expected: 2 workers, the product of the axes"),
    (("--servers", "1", "--workers", "198.51.100.7,198.51.100.8"), "expected: this host among 198.51.100.7, 198"),
    (("--workers", "198.51.100.7,198.51.100.8", "--hosts", "198.51.100.7"), "found:    --hosts and --workers"),
    (
        ("--servers", "127.0.0.1", "--host-rank", "0", "--master", "127.0.0.1", "--host-count", "2"),
        "127.0.0.1, which every host has for itself",
    ),
]


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_servers_are_refused_before_anything_starts(options, message, command, started, capsys):
    assert main([command, *options, "--devices", "cpu", __file__]) == 2
    assert message in capsys.readouterr().err
    assert not started


def test_verify_has_the_mode_sync_alone(started: list[RunConfig], capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--servers", "1", "--server-mode", "async", __file__]) == 2
    assert "found:    async" in capsys.readouterr().err
    assert not started


def test_modes_of_servers_reach_the_run(started: list[RunConfig]):
    options = ("--servers", "1", "--devices", "cpu", __file__)
    assert main(["run", "--server-mode", "bounded", "--staleness", "0", *options]) == 0
    assert main(["run", "--server-mode", "async", *options]) == 0
    assert main(["run", "--server-mode", "geo", "--geo-steps", "3", *options]) == 0
    servers = [find_requested(each.request) for each in started]
    found = [(each.mode, each.staleness, each.geo_steps) for each in servers if each is not None]
    assert found == [("bounded", 0, 10), ("async", 4, 10), ("geo", 4, 3)]


def test_an_unresolvable_name_is_no_address_of_this_host(started: list[RunConfig], capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--servers", "x", __file__]) == 2
    assert "found:    x, which is not this host" in capsys.readouterr().err
    assert not started


def test_missing_packages_of_servers_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_options, "SERVER_PACKAGES", ("numba", "no_such_package"))
    with pytest.raises(ConfigError, match="no no_such_package\nfix:      pip install"):
        server_options.require_server_packages()


def test_elastic_jobs_have_no_servers():
    elastic = Elastic(min_workers=1)
    request = RunRequest(worker_count=1, elastic=elastic, options={NAME: make_settings(RequestedServers(count=1))})
    with pytest.raises(ConfigError, match="omit the options of elastic jobs, or the servers"):
        make_run_config.make_run_config(Program(kind="script", target=__file__), request)


def test_the_declaration_says_what_the_code_does():
    extension = find_extension(NAME)
    assert extension is not None
    assert extension.role is not None
    assert extension.role.process == SERVER_ROLE
    options, request = extension.options, RequestedServers(count=1)
    assert options["server-mode"].metavar == "|".join(SERVER_MODES)
    defaults = {"server-mode": request.mode, "staleness": request.staleness, "geo-steps": request.geo_steps}
    defaults |= {"server-restarts": request.max_restarts}
    assert {name: options[name].help.endswith(f" Default: {value}.") for name, value in defaults.items()} == (
        dict.fromkeys(defaults, True)
    )


def test_servers_keep_a_core_each_if_there_are_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make_run_config, "core_count", lambda: 8)
    threads = [make_run_config.share_cores(3, count) for count in (1, 2, 5, 6)]
    assert threads == [2, 2, 1, 2]
    assert make_run_config.share_cores(3, 0) == 2


ENDPOINTS = [
    ("127.0.0.1:6170", Endpoint("127.0.0.1", 6170)),
    ("host-1.example", Endpoint("host-1.example")),
    ("[::1]:6170", Endpoint("::1", 6170)),
    ("[::1]", Endpoint("::1")),
    ("::1", Endpoint("::1")),
]


@pytest.mark.parametrize(("text", "endpoint"), ENDPOINTS)
def test_endpoints_have_a_host_and_perhaps_a_port(text: str, endpoint: Endpoint):
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["", ":6170", "a:b", "a:65536", "a:0", "a b", "[::1", "tcp://a:1", "a:1:2x", "user@a"])
def test_other_texts_are_no_endpoints(text: str):
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        parse_endpoint(text)


TRAINING = """
import json, os
import torch, rankless

servers = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"].get("servers")
with open(f"seen-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}", "w") as file:
    file.write(str(0 if servers is None else len(servers["addresses"])))
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return {"loss": model(inputs).square().mean()}

inputs = torch.randn(12, 2)
for batch in rankless.loader(torch.utils.data.TensorDataset(inputs), batch_size=6):
    train(*batch)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_verify_runs_several_workers_with_servers_and_one_without(tmp_path: Path):
    (tmp_path / "script.py").write_text(TRAINING)
    options = ("verify", "--servers", "2", "--workers", "3", "--devices", "cpu", "script.py")
    done = rankless(*options, folder=tmp_path, **install_server(tmp_path))
    assert (done.returncode, done.stderr.count("server")) == (0, 1)
    assert "on 1 and on 3 workers with 2 servers" in done.stderr
    seen = {path.name: path.read_text() for path in tmp_path.glob("seen-*")}
    assert seen == {"seen-1-0": "0"} | {f"seen-3-{rank}": "2" for rank in range(3)}
