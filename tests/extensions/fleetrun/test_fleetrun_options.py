"""fleetrun's options, and what they become: GPUs, hosts and environment, without running anything."""

import os
from pathlib import Path

import msgspec
import pytest

from rankless.cli import CommandParser, main
from rankless.config import make_run_config
from rankless.config.run_config import UNKNOWN_HOST, AgreedJobConfig, Cluster, Program, RunConfig
from rankless.errors import ConfigError
from rankless.extensions.fleetrun import command as fleetrun
from rankless.extensions.fleetrun import hosts
from rankless.extensions.fleetrun.parser import FLAGS, FleetrunFlags, list_arguments, read_flags
from rankless.extensions.fleetrun.profile import ENDPOINTS, share_out
from rankless.extensions.fleetrun.run_config import describe_ignored_options, fleetrun_program, fleetrun_request
from rankless.extensions.fleetrun.tables import format_arguments_table, format_environment_table, format_worker_line
from rankless.launch.launcher_profile import load_profile, make_run_folder
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.worker_configs import make_worker_configs

SCRIPT = Program(kind="script", target=__file__)


def parse(*words: str) -> FleetrunFlags:
    parser = CommandParser(prog="rankless", allow_abbrev=fleetrun.ABBREVIATES)
    fleetrun.add_arguments(parser)
    return read_flags(parser.parse_args(words))


def config_of(*words: str) -> RunConfig:
    return make_run_config.make_run_config(SCRIPT, fleetrun_request(parse(*words, "train.py"), SCRIPT))


def make_cluster(*words: str) -> Cluster:
    cluster = fleetrun_request(parse(*words, "train.py"), SCRIPT).cluster
    assert cluster is not None
    return cluster


def job_of(config: RunConfig) -> ReadyJob:
    count = config.worker_count
    start = AgreedJobConfig(
        run_id="run",
        seed=None,
        workers=(count,),
        backend="gloo",
        master_address="127.0.0.1",
        master_port=29500,
        store_address="127.0.0.1",
        store_port=1,
        launcher_variables={ENDPOINTS: ",".join(f"127.0.0.1:{6070 + rank}" for rank in range(count))},
    )
    return ReadyJob(
        peers=Peers(), start=start, profile=load_profile(config.request.launcher), devices=(config.devices,)
    )


def environments(config: RunConfig) -> list[dict[str, str | None]]:
    return [launch.environment for launch in make_worker_configs(config, job_of(config), folder="log/run")]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Lets this host have some number of GPUs, of which CUDA_VISIBLE_DEVICES shows some."""

    def have(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(
            make_run_config.glob, "glob", lambda _pattern: [f"/dev/nvidia{number}" for number in range(count)]
        )
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


LINES = [
    # GPUs, CUDA_VISIBLE_DEVICES, options: the workers' CUDA_VISIBLE_DEVICES, each one's FLAGS_selected_gpus
    (8, "0,1,2,3", [], "0,1,2,3", ["0", "1", "2", "3"]),
    (2, None, [], "0,1", ["0", "1"]),
    (4, None, ["--gpus=0"], "0", ["0"]),
    (4, None, ["--gpus=0,1,2,3"], "0,1,2,3", ["0", "1", "2", "3"]),
    (4, None, ["--gpus", "3,1"], "3,1", ["0", "1"]),
    (8, "4,5,6,7", ["--devices=5,6"], "5,6", ["0", "1"]),
    (4, None, ["--nproc_per_node=2"], "0,1,2,3", ["0,1", "2,3"]),
    (3, None, ["--nproc-per-node=2"], "0,1,2", ["0,1", "2"]),
    (4, None, ["--nproc_per_node=1"], "0,1,2,3", ["0,1,2,3"]),
    (2, None, ["--nproc_per_node=3"], "0,1", ["0", "1", "0"]),
    (0, None, [], None, [None]),
    (0, None, ["--nproc_per_node=4"], None, [None] * 4),
    (4, "", ["--nproc_per_node=2"], None, [None] * 2),
    (4, None, ["--nproc_per_node=2", "--backend=gloo"], "", [None] * 2),
]


@pytest.mark.parametrize(("present", "visible", "words", "seen", "selected"), LINES)
def test_every_line_gives_each_process_its_gpus(present, visible, words, seen, selected, gpus):
    gpus(present, visible)
    found = environments(config_of(*words))
    assert [each["FLAGS_selected_gpus"] for each in found] == selected
    assert {each.get("CUDA_VISIBLE_DEVICES") for each in found} == {seen}
    assert [each["LOCAL_RANK"] for each in found] == [str(rank) for rank in range(len(selected))]


def test_a_worker_computes_on_the_first_gpu_of_its_share(gpus):
    gpus(4)
    for words, devices in ((["--nproc_per_node=2"], ["cuda:0", "cuda:2"]), (["--gpus=3,1"], ["cuda:0", "cuda:1"])):
        config = config_of(*words)
        assert [launch.config.device for launch in make_worker_configs(config, job_of(config), folder="log")] == devices
    assert share_out([0, 1, 2, 3, 4], 2) == ((0, 1, 2), (3, 4))


@pytest.mark.parametrize(
    ("present", "words", "found"),
    [(0, ["--gpus=0"], "no GPU"), (2, ["--gpus=0,2"], "GPU 0, 1"), (0, ["--backend", "nccl"], "no GPU")],
)
def test_missing_gpus_are_rejected(present, words, found, gpus):
    gpus(present)
    with pytest.raises(ConfigError, match=found):
        config_of(*words)


@pytest.mark.parametrize("name", [spelling for flag in FLAGS for spelling in flag.spellings])
def test_every_option_is_known_with_and_without_an_equals_sign(name: str):
    flag = next(flag for flag in FLAGS if name in flag.spellings)
    for words in ([f"{name}=7"], [name, "7"]):
        flags = parse(*words, "train.py", "--gpus", "mine")
        assert str(getattr(flags, flag.dest)) == "7"
        assert flags.training_script == ("train.py", "--gpus", "mine")
    assert getattr(parse("train.py"), flag.dest) is None


def test_paddles_variables_stand_in_for_options_that_are_not_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PADDLE_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PADDLE_LOG_DIR", "elsewhere")
    flags = parse("--log_dir", "here", "train.py")
    assert (flags.nproc_per_node, flags.log_dir) == (3, "here")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gups=0", "--gpus"),
        ("--nproc_pre_node", "--nproc_per_node"),
        ("--ip_s=a", "--ips"),
        ("--logdir", "--log_dir"),
    ],
)
def test_the_error_for_a_misspelt_option_names_the_right_one(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as leaving:
        main(["fleetrun", given, "2", "train.py"])
    assert leaving.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_the_hosts_of_ips_are_numbered_in_their_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "rankless.config.hosts_and_addresses.own_addresses", lambda: frozenset({"192.168.0.16", "127.0.0.1"})
    )
    cluster = make_cluster("--ips=192.168.0.1,192.168.0.16", "--nproc_per_node=2")
    assert (cluster.host_index, cluster.port, cluster.agent_start, cluster.is_listed) == (1, 9988, "script", True)
    assert [(host.address, host.workers) for host in cluster.hosts] == [("192.168.0.1", 2), ("192.168.0.16", 2)]
    more = make_cluster("--ips", "192.168.0.1, 192.168.0.16", "--master=192.168.0.1:7000", "--rank=1", "--insecure")
    assert (more.port, more.insecure) == (7000, True)
    assert fleetrun_request(parse("--ips=192.168.0.16", "train.py"), SCRIPT).cluster is None
    for words in (
        ["--ips=192.168.0.1,192.168.0.2"],
        ["--ips=192.168.0.1"],
        ["--ips=192.168.0.16,192.168.0.16"],
        ["--ips=192.168.0.16:6070,192.168.0.1:6070"],
        ["--ips=192.168.0.16,"],
        ["--ips=192.168.0.16,192.168.0.1", "--rank=1"],
        ["--ips=192.168.0.16,192.168.0.1", "--nnodes=3"],
        ["--ips=192.168.0.16,192.168.0.1", "--master=192.168.0.1:7000"],
    ):
        with pytest.raises(ConfigError):
            config_of(*words)


def test_numbered_hosts_use_the_master_for_their_rendezvous(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "own_addresses", lambda: frozenset({"192.0.2.1"}))
    for words, place in (([], 0), (["--rank", "1"], 1), (["--rank=-1"], 0)):
        cluster = make_cluster("--nnodes=2:2", "--master", "http://192.0.2.1:7000", *words)
        assert (cluster.host_index, cluster.port, cluster.agent_start, len(cluster.hosts)) == (place, 7000, "manual", 2)
    assert make_cluster("--nnodes=2", "--master", "192.0.2.9:7000").host_index == UNKNOWN_HOST


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc_per_node=0"],
        ["--nnodes=2"],
        ["--nnodes=x"],
        ["--nnodes=1:2"],
        ["--nnodes=2", "--master=here"],
        ["--nnodes=2", "--master=etcd://h:2379"],
        ["--nnodes=2", "--master=h:1", "--rank=2"],
        ["--rank=1"],
        ["--np=2", "--elastic_server=h:2379"],
        ["--run_mode=rpc"],
        ["--backend=bkcl"],
        ["--xpus=0"],
        ["--start_port=70000"],
    ],
)
def test_invalid_values_are_rejected(words: list[str]):
    with pytest.raises(ConfigError):
        config_of(*words)


def test_a_note_names_every_ignored_option_and_no_other():
    assert (
        describe_ignored_options(
            parse("--gpus=0", "--log_dir=x", "--job_id=x", "--run_mode=collective", "--legacy=False", "x.py")
        )
        == []
    )
    loud = (
        "--host=a --log_level=DEBUG --log_overwrite=True --with_gloo=1 --max_restart=3 --elastic_level=1 --force=True"
    )
    loud += " --elastic_pre_hook=x --sort_ip=1 --legacy=True --enable_gpu_log=1 --ranks=0,1 --auto_tuner_json=x"
    notes = describe_ignored_options(parse(*loud.split(), "x.py"))
    for word in loud.split():
        assert sum(word.partition("=")[0] in note for note in notes) == 1, word


def test_the_table_of_arguments_has_paddles_rows_and_other_given_options():
    table = format_arguments_table(list_arguments(parse("--gpus=0,1", "--rank=0", "train.py", "--epochs", "2")))
    lines = dict(line.split(": ", 1) for line in table.splitlines()[1:-1])
    wanted = "gpus ips log_dir rank server_num servers training_script training_script_args worker_num workers"
    assert list(lines) == wanted.split()
    assert (lines["gpus"], lines["ips"], lines["log_dir"]) == ("0,1", "127.0.0.1", "log")
    assert lines["training_script_args"] == "['--epochs', '2']"


def test_the_box_shows_the_first_process_and_truncates_long_lists(gpus):
    gpus(16)
    config = config_of()
    box = format_environment_table(environments(config)[0], local_count=16).splitlines()
    assert box[0] == "Local start 16 processes. First process distributed environment info:"
    assert len({len(line) for line in box[1:]}) == 1
    rows = [line.strip(" |").split() for line in box]
    assert ["FLAGS_selected_gpus", "0"] in rows
    assert ["PADDLE_TRAINERS_NUM", "16"] in rows
    assert ["...", "16", "in", "all"] in rows
    assert sum("127.0.0.1:60" in line for line in box) == 1 + 7


def test_the_opening_line_names_shared_gpus(gpus):
    gpus(2)
    config = config_of("--nproc_per_node=3")
    lead = make_worker_configs(config, job_of(config), folder="log/run")[0].config
    logs = [f"workerlog.{number}" for number in range(3)]
    line = format_worker_line(config, lead, logs, folder="log/run", first_host="")
    assert "on cuda:0, cuda:1, which they share: they talk through Gloo" in line
    assert "log/workerlog.0 to workerlog.2" in line


def test_a_log_file_that_paddle_wrote_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus):
    monkeypatch.chdir(tmp_path)
    gpus(0)
    os.mkdir("log")
    Path("log/workerlog.0").write_text("Paddle's\n")
    for count in (2, 1):
        config = config_of(f"--nproc_per_node={count}")
        make_run_folder(
            config,
            load_profile(config.request.launcher),
            msgspec.structs.replace(job_of(config).start, run_id=f"run{count}"),
            0,
        )
    assert Path("log/workerlog.0.old").read_text() == "Paddle's\n"
    assert os.readlink("log/workerlog.0") == "run1/workerlog.0"
    assert not os.path.lexists("log/workerlog.1")


def test_a_program_other_than_a_python_script_runs_as_a_command(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("")
    assert fleetrun_program(parse(str(script))).kind == "script"
    script.chmod(0o755)
    assert fleetrun_program(parse(str(script))).kind == "command"
    assert fleetrun_program(parse("sh", "-c", "exit")).kind == "command"
    assert fleetrun_program(parse("train.py")).kind == "script"
    with pytest.raises(ConfigError, match="a script to run"):
        fleetrun_program(parse())
