"""horovodrun's options, and what they become: hosts, slots and variables, without running anything."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from extensions.horovodrun.horovodrun_spellings import SPELLINGS

from rankless.cli import CommandParser, main
from rankless.config import environment, hosts_and_addresses
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Cluster, Elastic, Program, RunRequest, decode_settings
from rankless.errors import ConfigError
from rankless.extensions.horovodrun import command as horovodrun
from rankless.extensions.horovodrun import hosts as horovodrun_hosts
from rankless.extensions.horovodrun.parser import HorovodrunFlags, read_flags
from rankless.extensions.horovodrun.run_config import (
    describe_ignored_options,
    horovodrun_program,
    horovodrun_request,
    worker_variables,
)
from rankless.extensions.horovodrun.settings import HorovodrunSettings, NamedHost

HERE = "10.7.0.1"
"""What this machine is called in these tests; 10.7.0.2 and 10.7.0.3 are others."""


@pytest.fixture(autouse=True)
def _addresses(monkeypatch: pytest.MonkeyPatch):
    known = {"localhost": "127.0.0.1", "mine": HERE, "other": "10.7.0.2"}
    for module in (hosts_and_addresses, horovodrun_hosts):
        monkeypatch.setattr(module, "addresses_of", lambda name: frozenset({known.get(name, name)}))
    monkeypatch.setattr(hosts_and_addresses, "own_addresses", lambda: frozenset({HERE, "127.0.0.1"}))
    monkeypatch.setattr(horovodrun_hosts, "interface_towards", lambda _: ("eth0", HERE))
    monkeypatch.setattr(
        horovodrun_hosts,
        "own_host_index",
        lambda hosts: next(n for n, h in enumerate(hosts) if h.address in (HERE, "mine")),
    )


def parse(*words: str) -> HorovodrunFlags:
    parser = CommandParser(prog="rankless horovodrun", allow_abbrev=horovodrun.ABBREVIATES)
    horovodrun.add_arguments(parser)
    return horovodrun.apply_config_file(read_flags(parser.parse_args(words)))[0]


def request_of(*words: str) -> RunRequest:
    flags = parse(*words, "python", "train.py")
    return horovodrun_request(flags, Program(kind="script", target="train.py"))


def make_cluster(*words: str) -> Cluster:
    cluster = request_of(*words).cluster
    assert cluster is not None
    return cluster


def variables(*words: str) -> dict[str, str]:
    return dict(worker_variables(parse("-np", "1", *words)))


@pytest.mark.parametrize("words", SPELLINGS)
def test_every_spelling_is_known_and_the_program_gets_the_rest(words: str):
    field, value = SPELLINGS[words]
    flags = parse(*words.split(), "python", "train.py", "-np", "9", "--verbose")
    assert getattr(flags, field) == value
    assert flags.command == ("python", "train.py", "-np", "9", "--verbose")
    wanted = msgspec.structs.replace(HorovodrunFlags(command=flags.command), **{field: value})
    assert flags == wanted


def test_no_field_is_without_an_option():
    spelled = {field for field, _ in SPELLINGS.values()}
    others = {"config_file", "mpi_launch_flag", "command"}
    assert spelled | others == set(HorovodrunFlags.__struct_fields__)


def test_the_error_for_an_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(["horovodrun", "-np", "2", "--fusion-treshold-mb", "3", "python", "train.py"])
    assert leaving.value.code == 2
    assert "unknown option --fusion-treshold-mb; did you mean --fusion-threshold-mb?" in capsys.readouterr().err
    for pair in (("--gloo", "--mpi"), ("-H", "a:1", "-hostfile", "file"), ("--autotune", "--no-autotune")):
        with pytest.raises(SystemExit):
            parse(*pair)
        assert "not allowed with" in capsys.readouterr().err


def test_options_set_variables_in_the_workers_environment():
    assert variables() == {}
    assert variables("--fusion-threshold-mb", "32") == {"HOROVOD_FUSION_THRESHOLD": str(32 << 20)}
    found = variables(
        *("--cycle-time-ms", "3.5", "--cache-capacity", "0", "--timeline-filename", "t.json", "--timeline-mark-cycles"),
        *("--no-stall-check", "--stall-check-warning-time-seconds", "6", "--stall-check-shutdown-time-seconds", "7"),
        *("--gloo-timeout-seconds", "8", "--log-level", "INFO", "--log-without-timestamp", "--tcp", "--no-autotune"),
    )
    assert found == {
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "6",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "8",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "HOROVOD_AUTOTUNE": "0",
        "NCCL_IB_DISABLE": "1",
    }
    assert variables("--network-interface", "lo") == {
        "HOROVOD_GLOO_IFACE": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def test_the_tutorials_launch_flag_sets_variables_and_rejects_the_rest():
    assert variables("--mpi-launch-flag", "env CUDA_VISIBLE_DEVICES=0") == {"CUDA_VISIBLE_DEVICES": "0"}
    found = variables("--mpi-launch-flag", "-x A='b c'", "--mpi-launch-flag", "env D=1 E=")
    assert found == {"A": "b c", "D": "1", "E": ""}
    with pytest.raises(ConfigError, match="mpirun"):
        variables("--mpi-launch-flag", "--map-by socket")
    assert request_of("-np", "2", "--mpi-launch-flag", "env CUDA_VISIBLE_DEVICES=").devices == "cpu"


@pytest.mark.parametrize(
    "option", ["--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--thread-affinity"]
)
def test_a_negative_number_is_rejected(option: str):
    with pytest.raises(ConfigError, match=f"{option} from 0 up"):
        request_of("-np", "1", f"{option}=-1")
    with pytest.raises(ConfigError, match="from 0 to 1"):
        request_of("-np", "1", "--autotune-gaussian-process-noise", "2")
    for words in ((), ("-np", "0")):
        with pytest.raises(ConfigError, match="-np as a number"):
            request_of(*words)
    with pytest.raises(ConfigError, match="network interface"):
        variables("--network-interfaces", "nothere0")


def test_a_note_names_each_ignored_option():
    words = (
        *("--disable-cache", "--mpi", "--mpi-args=x", "--binding-args=x", "--mpi-threads-disable"),
        *(
            "--num-nccl-streams",
            "1",
            "--thread-affinity",
            "1",
            "--hierarchical-allgather",
            "--autotune",
            "--max-np",
            "3",
        ),
    )
    notes = describe_ignored_options(parse(*words, "-np", "1"))
    assert [line.split(": ")[0] for line in notes] == [
        *("--disable-cache", "--mpi, --jsrun", "--mpi-args", "--binding-args", "--mpi-threads-disable"),
        *("--num-nccl-streams", "--thread-affinity", "--hierarchical-allgather", "--autotune"),
        "--max-np and other elastic options",
    ]
    assert describe_ignored_options(parse("-np", "2", "--gloo", "-H", "localhost:2", "--start-timeout", "3")) == []


CONFIG = """
controller: gloo
verbose: true
params:
    fusion_threshold_mb: 32
    cycle_time_ms: 5
    hierarchical_alreduce: true
    torus_allreduce: false
autotune:
    enabled: true
    log_file: tuned.csv
timeline:
    filename: timeline.json
    mark_cycles: true
stall_check:
    enabled: false
    warning_time_seconds: 120
library_options:
    gloo_timeout_seconds: 90
logging:
    level: DEBUG
    with_timestamp: false
"""


def test_a_config_file_completes_the_command_line(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    flags, notes = horovodrun.apply_config_file(
        HorovodrunFlags(config_file=str(path), cycle_time_ms=1.0, timeline_mark_cycles=False)
    )
    assert (flags.gloo, flags.fusion_threshold_mb, flags.cycle_time_ms, flags.torus_allreduce) == (True, 32, 1.0, False)
    assert (flags.autotune, flags.autotune_log_file) == (True, "tuned.csv")
    assert (flags.timeline_filename, flags.timeline_mark_cycles) == ("timeline.json", False)
    assert (flags.no_stall_check, flags.stall_check_warning_time_seconds) == (True, 120)
    assert (flags.gloo_timeout_seconds, flags.log_level, flags.log_with_timestamp) == (90, "DEBUG", False)
    assert [line.removeprefix(f"{path}: ") for line in notes] == [
        "verbose: unknown key, ignored",
        "params.hierarchical_alreduce (did you mean hierarchical_allreduce?): unknown key, ignored",
    ]
    path.write_text("params:\n")
    assert parse("--config-file", str(path)) == HorovodrunFlags(config_file=str(path))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("params: [", "in YAML"),
        ("params: 3", "sections"),
        ("- params", "sections"),
        ("params: {fusion_threshold_mb: many}", "of the right types"),
        ("controller: smoke", "controller: gloo or mpi"),
    ],
)
def test_an_invalid_config_file_is_rejected(text: str, match: str, tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        parse("--config-file", str(path))
    with pytest.raises(ConfigError, match="No such file"):
        parse("--config-file", str(tmp_path / "none.yaml"))


def test_the_first_hosts_are_filled_first_and_too_few_slots_are_rejected(tmp_path: Path):
    assert [(h.address, h.workers) for h in make_cluster("-np", "3", "-H", "mine:2,other:4").hosts] == [
        ("mine", 2),
        ("other", 1),
    ]
    assert request_of("-np", "2", "-H", "mine:2,other:4").cluster is None
    with pytest.raises(ConfigError, match=r"Requested more processes \(4\) than there are available slots \(3\)"):
        request_of("-np", "4", "-H", "mine:2,other:1")
    (tmp_path / "hosts").write_text("mine slots=1\n# a comment\nother slots=2\n")
    assert make_cluster("-np", "3", "-hostfile", str(tmp_path / "hosts")).hosts[1].workers == 2


def test_every_name_of_this_machine_means_it_and_others_get_an_address_of_it():
    for name in ("localhost", "127.0.0.1", "mine", HERE):
        assert request_of("-np", "2", "-H", f"{name}:2").cluster is None
    request = request_of("-np", "3", "-H", "localhost:2,127.0.0.1:1")
    assert request.cluster is None
    assert request.launcher is not None
    named = decode_settings(request.launcher.settings, HorovodrunSettings).hosts
    assert named == (NamedHost(name="localhost", slots=2), NamedHost(name="127.0.0.1", slots=1))
    cluster = make_cluster("-np", "3", "-H", "localhost:1,mine:1,other:1", "-p", "2222", "-i", "key")
    assert [(host.address, host.workers) for host in cluster.hosts] == [(HERE, 2), ("other", 1)]
    assert (cluster.ssh_port, cluster.ssh_identity_file, cluster.agent_start) == (2222, "key", "ssh")
    with pytest.raises(ConfigError, match="list mine first"):
        request_of("-np", "2", "-H", "other:1,mine:1")


def test_the_start_timeout_is_the_options_or_the_environments_or_30_s(monkeypatch: pytest.MonkeyPatch):
    words = ("-np", "2", "-H", "mine:1,other:1")
    assert make_cluster(*words).join_timeout_seconds == 30
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "70")
    assert make_cluster(*words).join_timeout_seconds == 70
    assert make_cluster(*words, "--start-timeout", "5").join_timeout_seconds == 5
    with pytest.raises(ConfigError, match="--start-timeout"):
        make_cluster(*words, "--start-timeout", "0")


def test_this_pythons_programs_run_in_the_worker_and_all_else_is_a_command(tmp_path: Path):
    python = sys.executable

    def program(*words: str) -> Program:
        return horovodrun_program(HorovodrunFlags(command=words))

    assert program(python, "train.py", "-c") == Program(kind="script", target="train.py", arguments=("-c",))
    assert program(python, "-u", "-m", "mine", "x") == Program(kind="module", target="mine", arguments=("x",))
    assert program(python, "-c", "print(1)") == Program(kind="code", target="print(1)")
    for words in ((python, "-O", "train.py"), (python,), ("env", "A=1", python, "train.py"), ("bash", "run.sh")):
        assert program(*words) == Program(kind="command", target=words[0], arguments=words[1:])
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert program(str(other), "train.py").kind == "command"
    script = tmp_path / "train.py"
    script.write_text("")
    assert program(str(script)).kind == "script"
    script.chmod(0o755)
    assert program(str(script)).kind == "command"
    with pytest.raises(ConfigError, match="a program to run"):
        program()


def test_elastic_options_make_an_elastic_job():
    line = "--min-np 1 --max-np 8 --elastic-timeout 60 --reset-limit 3 --blacklist-cooldown-range 5 50 -p 2222"
    words = line.split()
    assert request_of("-np", "2", *words, "-H", "a:4,b:4").elastic == Elastic(
        min_workers=1,
        max_workers=8,
        hosts=(("a", 4), ("b", 4)),
        elastic_timeout_seconds=60.0,
        reset_limit=3,
        cooldown_range_seconds=(5.0, 50.0),
        ssh_port=2222,
    )
    discovered = request_of("-np", "2", "--host-discovery-script", "./hosts.sh", "--slots-per-host", "4").elastic
    assert discovered == Elastic(min_workers=2, discovery_script="./hosts.sh", slots_per_host=4)
    assert request_of("-np", "2", "--max-np", "4").elastic is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--min-np 0", "--min-np from 1 up"),
        ("--min-np 3", "-np of at least --min-np 3"),
        ("--min-np 1 --max-np 1", "at most --max-np 1"),
        ("--min-np 1 --blacklist-cooldown-range 9 3", "0 < MIN <= MAX"),
        ("--min-np 1 -H a:1", "than there are available slots"),
    ],
)
def test_invalid_elastic_options_are_rejected(words: str, text: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=text):
        make_run_config(Program(kind="script", target=str(script)), request_of("-np", "2", *words.split()))


def test_ranks_seed_themselves_although_a_program_names_rankless(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import rankless\n")
    program = Program(kind="script", target=str(script))
    assert make_run_config(program, RunRequest(worker_count=2)).seed is not None
    job = horovodrun_request(parse("-np", "2", "python", str(script)), program)
    assert make_run_config(program, job).seed is None


def test_other_hosts_get_the_environment_except_variables_of_one_host(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_MODE", "HOROVOD_LOG_LEVEL", "SSH_AUTH_SOCK", "HOME", environment.TOKEN_FILE):
        monkeypatch.setenv(name, "x")
    found = environment.exported_variables()
    assert {"WANDB_MODE", "HOROVOD_LOG_LEVEL"} <= found.keys()
    assert not {"SSH_AUTH_SOCK", "HOME", environment.TOKEN_FILE} & found.keys()
    assert set(found) <= set(os.environ)
    carried = environment.carried_variables()
    assert "HOROVOD_LOG_LEVEL" in carried
    assert "WANDB_MODE" not in carried


LINES = [
    (["-np", "2", "train.py", "--b", "--log"], ["-np", "2", "--", "train.py", "--b", "--log"]),
    (["--verb", "--fusion=3", "-H", "a:1", "python", "x"], ["--verb", "--fusion=3", "-H", "a:1", "--", "python", "x"]),
    (["--blacklist", "1", "2", "python"], ["--blacklist", "1", "2", "--", "python"]),
    (["-np", "2", "--", "python", "--"], ["-np", "2", "--", "python", "--"]),
    (["-np", "2", "--nonsense", "python"], ["-np", "2", "--nonsense", "--", "python"]),
    (["-np"], ["-np"]),
    (["--verbose"], ["--verbose"]),
]


@pytest.mark.parametrize(("given", "apart"), LINES)
def test_a_programs_arguments_are_never_abbreviated_options_of_ours(given: list[str], apart: list[str]):
    parser = CommandParser(prog="rankless horovodrun", allow_abbrev=horovodrun.ABBREVIATES)
    horovodrun.add_arguments(parser)
    assert parser.insert_program_separator(given) == apart


def test_an_abbreviated_option_is_known():
    assert parse("--fusion-threshold", "3", "--verb") == HorovodrunFlags(fusion_threshold_mb=3, verbose=True)
