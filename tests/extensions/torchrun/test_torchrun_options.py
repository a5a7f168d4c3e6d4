"""torchrun's options are ours: torch's own parser says what they are."""

import argparse
from pathlib import Path

import pytest
from torch.distributed import argparse_util
from torch.distributed import launch as torch_launch
from torch.distributed.run import get_args_parser

from rankless.cli import CommandParser, main
from rankless.config import make_run_config
from rankless.config.available_cpu_and_memory import core_count
from rankless.config.run_config import UNKNOWN_HOST, Program, decode_settings
from rankless.errors import ConfigError
from rankless.extensions.torchrun import command as torchrun
from rankless.extensions.torchrun import launch_command as launch
from rankless.extensions.torchrun import run_config as torchrun_run_config
from rankless.extensions.torchrun.parser import FLAGS, TorchrunFlags, read_flags
from rankless.extensions.torchrun.profile import TorchrunSettings
from rankless.extensions.torchrun.run_config import (
    describe_ignored_options,
    make_hosts,
    torchrun_program,
    torchrun_request,
    worker_count,
)

SCRIPT = Program(kind="script", target=__file__)


def torch_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}


TORCHS = torch_options(get_args_parser())


def parse(*words: str, command=torchrun) -> TorchrunFlags:
    parser = CommandParser(prog="rankless", allow_abbrev=command.ABBREVIATES)
    command.add_arguments(parser)
    return read_flags(parser.parse_args(words))


def value_for(action: argparse.Action) -> str:
    if action.choices:
        return str(next(iter(reversed(list(action.choices)))))
    return "7" if action.type in (int, float) else "8"


def spellings(action: argparse.Action) -> list[str]:
    long = max(action.option_strings, key=len).removeprefix("--").replace("_", "-")
    both = {f"--{long}", f"--{long.replace('-', '_')}"}
    return sorted(both | set(action.option_strings))


@pytest.mark.parametrize("dest", TORCHS)
def test_every_option_of_torchs_parser_is_known_in_both_spellings(dest: str):
    action = TORCHS[dest]
    for spelling in spellings(action):
        words = [spelling] if action.nargs == 0 else [spelling, value_for(action)]
        flags = parse(*words, "main.py", "--its", "own")
        found = getattr(flags, dest)
        assert found is True if action.nargs == 0 else str(found) in (value_for(action), f"{value_for(action)}.0")
        assert flags.training_script == ("main.py", "--its", "own")
    assert getattr(parse("main.py"), dest) in (None, False)


@pytest.mark.parametrize("dest", TORCHS)
def test_the_pet_variables_of_torch_stand_in_for_its_options(dest: str, monkeypatch: pytest.MonkeyPatch):
    action = TORCHS[dest]
    value = "1" if action.nargs == 0 else value_for(action)
    monkeypatch.setenv(f"PET_{dest.upper()}", value)
    stands_in = isinstance(action, argparse_util.env | argparse_util.check_env)
    assert (getattr(parse("main.py"), dest) not in (None, False)) == stands_in


def test_our_parser_has_no_option_that_torchs_lacks():
    assert {flag.dest for flag in FLAGS} == set(TORCHS)


def test_launch_has_use_env_besides(monkeypatch: pytest.MonkeyPatch):
    seen = {}
    monkeypatch.setattr(torch_launch, "get_args_parser", lambda: seen.setdefault("parser", get_args_parser()))
    torch_launch.parse_args(["main.py"])
    assert set(torch_options(seen["parser"])) == set(TORCHS) | {"use_env"}
    assert not parse("main.py", command=launch).use_env
    assert parse("--use-env", "main.py", command=launch).use_env
    assert parse("--use_env", "main.py", command=launch).use_env


def test_the_tutorials_command_line_is_parsed_as_torch_parses_it():
    words = "--nnodes=2 --node_rank=0 --nproc_per_node 8 --master_addr 10.0.0.1 --master_port 2950 main.py -m --tee x"
    ours, theirs = parse(*words.split(), command=launch), get_args_parser().parse_args(words.split())
    assert (ours.nnodes, ours.node_rank, ours.nproc_per_node) == ("2", 0, "8")
    assert (ours.master_addr, ours.master_port) == (theirs.master_addr, theirs.master_port)
    assert ours.training_script == (theirs.training_script, *theirs.training_script_args)


def test_options_may_be_cut_short_as_torchs_may_and_two_dashes_end_them():
    assert parse("--standal", "--", "main.py", "--x").standalone
    assert parse("--standal", "--", "main.py", "--x").training_script == ("main.py", "--x")


@pytest.mark.parametrize("command", ["torchrun", "launch"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--master_adderss", "--master_addr"),
        ("--master-adderss", "--master-addr"),
        ("--nproc_pre_node=2", "--nproc_per_node"),
        ("--nproc-pre-node=2", "--nproc-per-node"),
        ("--max_restart_count", "--max_restarts"),
        ("--rdvz-endpoint=x:1", "--rdzv-endpoint"),
        ("--stand_alone", "--standalone"),
    ],
)
def test_the_error_for_a_misspelt_option_names_the_right_one(
    command: str, given: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as leaving:
        main([command, given, "10.0.0.1", "main.py"])
    assert leaving.value.code == 2
    notes = capsys.readouterr().err
    assert f"unknown option {given.partition('=')[0]}; did you mean {meant}?" in notes
    assert len(notes.splitlines()) <= 3


def test_the_error_for_an_option_without_a_near_match_suggests_none(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["torchrun", "--use_env", "main.py"])
    assert capsys.readouterr().err.endswith("unknown option --use_env\n")


@pytest.mark.parametrize(
    ("text", "gpus", "count"),
    [("3", 0, 3), ("auto", 0, 6), ("auto", 4, 4), ("gpu", 4, 4), ("cpu", 4, 6), ("cpu", 0, 6)],
)
def test_the_number_of_workers_is_torchs(text: str, gpus: int, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_run_config, "count_gpus", lambda: gpus)
    monkeypatch.setattr(torchrun_run_config, "core_count", lambda: 6)
    assert worker_count(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "gpu", "xpu", "two", "1.5"])
def test_an_invalid_number_of_workers_is_rejected(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_run_config, "count_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="--nproc-per-node"):
        worker_count(text)


@pytest.mark.parametrize(
    ("words", "address", "port"),
    [
        ([], "127.0.0.1", None),
        (["--master-addr", "localhost", "--master-port", "2950"], "localhost", 2950),
        (["--master-addr", "[::1]", "--master-port", "0"], "::1", None),
        (["--rdzv-endpoint", "localhost:2951"], "localhost", 2951),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:2951"], "127.0.0.1", None),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], "127.0.0.1", None),
        (["--standalone", "--master-port", "2950", "--rdzv-endpoint", "elsewhere:1"], "127.0.0.1", None),
    ],
)
def test_the_address_of_the_store_is_torchruns(words: list[str], address: str, port: int | None):
    request = torchrun_request(parse(*words, "main.py"), SCRIPT)
    assert (request.master_address, request.master_port) == (address, port)


def test_several_hosts_use_torchruns_rendezvous_address():
    words = ["--nnodes", "4", "--node-rank", "1", "--master-addr", "192.0.2.1", "--nproc-per-node", "2"]
    cluster = torchrun_request(parse(*words, "main.py"), SCRIPT).cluster
    assert cluster is not None
    assert (cluster.host_index, cluster.port, cluster.is_listed, cluster.agent_start) == (1, 29500, False, "manual")
    assert [host.workers for host in cluster.hosts] == [2] * 4
    assert cluster.hosts[0].address == "192.0.2.1"
    words = ["--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1:1234", "--insecure"]
    flags = parse(*words, "--rdzv-conf", "join_timeout=5,b=2", "--local-addr", "me", "main.py")
    request = torchrun_request(flags, SCRIPT)
    assert request.cluster is not None
    assert (request.cluster.host_index, request.cluster.port, request.cluster.insecure) == (UNKNOWN_HOST, 1234, True)
    assert request.cluster.join_timeout_seconds == 5
    assert (make_hosts(flags).endpoint, make_hosts(flags).local_address) == ("192.0.2.1:1234", "me")
    with pytest.raises(ConfigError, match="a fixed number of hosts"):
        torchrun_request(parse("--nnodes", "2:4", "main.py"), SCRIPT)
    flags = parse("--nnodes", "1:1", "main.py")
    assert make_run_config.make_run_config(SCRIPT, torchrun_request(flags, SCRIPT)).cluster is None
    assert make_hosts(flags).most == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "x"],
        ["--nnodes", "0"],
        ["--nnodes", "2:1"],
        ["--nnodes", "1", "--node-rank", "1"],
        ["--nnodes", "1:2"],
        ["--max-restarts", "-1"],
        ["--rdzv-endpoint", "nowhere"],
        ["--rdzv-conf", "timeout"],
        ["--redirects", "4"],
        ["--tee", "0:1;1:1"],
        ["--local-ranks-filter", "first"],
        ["--signals-to-handle", "SIGKILL"],
        ["--signals-to-handle", "SIGTREM"],
        ["--shutdown-timeout", "-1"],
        ["--master-port", "70000"],
        ["--no-python", "--module"],
    ],
)
def test_invalid_values_are_rejected(words: list[str]):
    flags = parse(*words, __file__)
    with pytest.raises(ConfigError):
        make_run_config.make_run_config(SCRIPT, torchrun_request(flags, torchrun_program(flags)))


def test_threads_are_torchruns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    many = make_run_config.make_run_config(SCRIPT, torchrun_request(parse("--nproc-per-node", "2", "main.py"), SCRIPT))
    one = make_run_config.make_run_config(SCRIPT, torchrun_request(parse("main.py"), SCRIPT))
    assert (many.threads_per_worker, one.threads_per_worker) == (1, core_count())
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    many = make_run_config.make_run_config(SCRIPT, torchrun_request(parse("--nproc-per-node", "2", "main.py"), SCRIPT))
    assert many.threads_per_worker == 5


def test_the_shown_streams_follow_redirects_tee_and_filter():
    def shown(*words: str) -> list[tuple[int, str, str]]:
        request = torchrun_request(parse("--nproc-per-node", "2", *words, "main.py"), SCRIPT)
        assert request.launcher is not None
        settings = decode_settings(request.launcher.settings, TorchrunSettings)
        return [(stream.rank, stream.source, stream.prefix) for stream in settings.streams]

    assert shown() == [(0, "out", ""), (0, "err", ""), (1, "out", ""), (1, "err", "")]
    assert shown("-r", "3") == []
    assert shown("-r", "0:1,1:2") == [(0, "err", ""), (1, "out", "")]
    assert shown("-t", "1:1", "-r", "3", "--role", "dog") == [(1, "out", "[dog1]:")]
    assert shown("--local-ranks-filter", "1", "-t", "3") == [(1, "out", "[default1]:"), (1, "err", "[default1]:")]


def test_a_note_names_every_ignored_option_of_torchrun_and_no_other():
    silent = ["--standalone", "--role", "x", "--rdzv-backend", "c10d", "--rdzv-id", "x", "-r", "1"]
    assert describe_ignored_options(parse(*silent, "--max-restarts", "0", "main.py")) == []
    loud = {
        "--max-restarts": "3",
        "--monitor-interval": "1",
        "--event-log-handler": "console",
        "--logs-specs": "mine",
        "--numa-binding": "node",
        "--rdzv-backend": "etcd",
        "--rdzv-conf": "a=1",
        "--local-addr": "h",
    }
    notes = "; ".join(describe_ignored_options(parse(*(word for pair in loud.items() for word in pair), "main.py")))
    assert all(option in notes for option in loud)


def test_a_gpu_of_its_own_for_each_worker_needs_enough_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    words = ["--virtual-local-rank", "main.py"]
    assert torchrun_request(parse("--nproc-per-node", "2", *words), SCRIPT).worker_count == 2
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3,5"):
        torchrun_request(parse("--nproc-per-node", "3", *words), SCRIPT)


def test_a_missing_command_is_rejected(tmp_path: Path):
    flags = parse("--no-python", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="a command"):
        make_run_config.check_program(torchrun_program(flags))
