"""The doctor on one host: its checks of devices, limits, cards and proxies, its table, JSON and exit codes."""

import io
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import rankless
from support.json_schema import check_result

from rankless.config.hosts_and_addresses import parse_hosts
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Cluster, Program, RunRequest
from rankless.errors import JoinError
from rankless.launch.doctor.host_pairs import schedule_rounds
from rankless.launch.doctor.machine_checks import GpuFacts, evaluate_gpus
from rankless.launch.doctor.preflight_and_host_checks import check_host, check_host_quickly, run_preflight
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.launch.rendezvous.connect_and_measure import SECRET_BYTES, connect_all, measure_link, start_listener
from rankless.launch.rendezvous.ssh import find_ssh_cause
from rankless.records.doctor_records import CheckResult, make_failure, make_pass, make_warning, with_place
from rankless.records.host_connection_tests import ConnectionTarget
from rankless.terminal.doctor_table import make_doctor_report, render_doctor_report

SECRET = b"s" * SECRET_BYTES
H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        (GpuFacts(), [("pass", "no NVIDIA GPU: workers compute on the CPU")]),
        (GpuFacts(cuda="13.0"), [("pass", "no NVIDIA GPU: workers compute on the CPU (torch has CUDA 13.0)")]),
        (GpuFacts(visible=["0"]), [("warn", "no NVIDIA GPU, but CUDA_VISIBLE_DEVICES=0")]),
        (GpuFacts(names=(), error="no devices"), [("pass", "no NVIDIA GPU: workers compute on the CPU")]),
        (GpuFacts(files=8), [("warn", "8 device files, but no nvidia-smi")]),
        (GpuFacts(files=8, names=(), error="mismatch"), [("fail", "nvidia-smi fails: mismatch")]),
        (GpuFacts(names=[H200]), [("fail", "the driver has 1 x NVIDIA H200, but /dev/nvidia0 does not exist")]),
        (
            GpuFacts(files=2, names=[H200] * 2, driver="580.65", cuda="13.0"),
            [("pass", "2 x NVIDIA H200"), ("pass", "580.65, for torch's CUDA 13.0")],
        ),
        (
            GpuFacts(files=2, names=[H200] * 2, driver="550.1", cuda="13.0", visible=["0", "2"]),
            [
                ("fail", "2 x NVIDIA H200; CUDA_VISIBLE_DEVICES=0,2: device 2 does not exist"),
                ("fail", "550.1, too old for torch's CUDA 13.0"),
            ],
        ),
        (
            GpuFacts(files=2, names=[H200] * 2, driver="550.1", visible=["1", "1"]),
            [
                ("fail", "2 x NVIDIA H200; CUDA_VISIBLE_DEVICES=1,1: device 1 is listed twice"),
                ("warn", "550.1, but torch is missing or built without CUDA"),
            ],
        ),
        (
            GpuFacts(files=2, names=[H200] * 2, driver="550.1", cuda="12.8", visible=["1"]),
            [
                (
                    "warn",
                    "2 x NVIDIA H200; CUDA_VISIBLE_DEVICES=1: 2 workers would share 1, and communicate through Gloo",
                ),
                ("pass", "550.1, for torch's CUDA 12.8"),
            ],
        ),
        (
            GpuFacts(files=1, names=[H200], driver="550.1", cuda="12.8", visible=[]),
            [
                ("warn", "1 x NVIDIA H200; CUDA_VISIBLE_DEVICES=none: all GPUs are hidden"),
                ("pass", "550.1, for torch's CUDA 12.8"),
            ],
        ),
    ],
)
def test_gpus_drivers_and_visible_devices_are_checked_together(found: GpuFacts, rows: list[tuple[str, str]]):
    results = evaluate_gpus(found, workers=2)
    assert [(row.status, row.seen) for row in results] == rows
    assert all(bool(row.fix) == (row.status != "pass") for row in results)


def make_request(**changes: object) -> CheckHost:
    return CheckHost(**{"workers": 1, "port": 9988, "log_folder": "log", **changes})  # type: ignore[arg-type]


def test_the_installed_tools_of_a_host_are_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in (("mpirun", "mpirun (Open MPI) 4.1.4\nand more"), ("nvidia-smi", f"{H200}, 580.65.06")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows = {row.name: row for row in check_host(make_request()).results}
    assert rows["MPI"].seen == f"mpirun (Open MPI) 4.1.4 ({tmp_path / 'mpirun'}); none is needed"
    assert H200 in rows["GPUs"].seen


def test_a_proxy_is_fine_if_no_proxy_lists_the_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("all_proxy", "socks5://proxy.example")
    request = make_request(others=("10.0.0.2", "b.cluster"), has_several=True)
    for no_proxy, status in (("10.0.0.2,.cluster", "pass"), ("*", "pass"), ("10.0.0.2", "warn"), ("", "warn")):
        monkeypatch.setenv("no_proxy", no_proxy)
        (row,) = (row for row in check_host_quickly(request) if row.name == "proxies")
        assert row.status == status, no_proxy


def test_preflight_warns_about_risks_and_raises_for_failures(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("http_proxy", "http://proxy.example")
    monkeypatch.delenv("no_proxy", raising=False)
    warnings: list[str] = []
    cluster = Cluster(hosts=parse_hosts("127.0.0.1,no.such.name.invalid", workers_per_host=1), host_index=0)
    config = make_run_config(Program(kind="code", target=""), RunRequest(worker_count=1, cluster=cluster))
    run_preflight(config, warnings.append)
    (text,) = warnings
    assert "proxies: http_proxy=http://proxy.example" in text
    assert "network card: the name no.such.name.invalid does not resolve here" in text
    # The other hosts must resolve host 0's name.
    cluster = Cluster(hosts=tuple(reversed(cluster.hosts)), host_index=1)
    config = make_run_config(Program(kind="code", target=""), RunRequest(worker_count=1, cluster=cluster))
    with pytest.raises(JoinError) as refused:
        run_preflight(config, warnings.append)
    assert refused.value.found == "network card: the name no.such.name.invalid does not resolve here"
    assert "127.0.0.1 to pass the checks for a job" in str(refused.value.expected)


def test_listeners_serve_only_clients_with_the_secret():
    listening = start_listener(3, SECRET)
    assert listening is not None
    with listening:
        port = listening.getsockname()[1]
        assert start_listener(4, SECRET, port) is None
        right, another = (ConnectionTarget(host_index=place, address="127.0.0.1", port=port) for place in (3, 4))
        unknown = ConnectionTarget(host_index=3, address="no.such.name.invalid", port=port)
        outcomes = [each.outcome for each in connect_all([right, another, unknown], SECRET)]
        assert outcomes == ["reached", "another", "no name"]
        (intruder,) = connect_all([right], b"x" * SECRET_BYTES)
        assert intruder.outcome == "another"
        speed = measure_link(right, SECRET)
        assert not speed.error
        assert 0 < speed.round_trip_seconds < 1
        assert speed.bytes_per_second > 1e6
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (refused,) = connect_all(
            [ConnectionTarget(host_index=3, address="127.0.0.1", port=closed.getsockname()[1])], SECRET
        )
    assert refused.outcome == "refused"


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_each_pair_is_measured_once_and_no_host_twice_in_a_round(count: int):
    rounds = schedule_rounds(range(count))
    for pairs in rounds:
        measured = list(itertools.chain(*pairs))
        assert len(measured) == len(set(measured))
    assert sorted(itertools.chain(*rounds)) == sorted(itertools.permutations(range(count), 2))


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ("root@b: Permission denied (publickey,password).", "ssh asks for a password"),
        ("Host key verification failed.", "the host's key is not known here"),
        ("ssh: connect to host b port 22: Connection refused", "it is up, but no sshd listens"),
        ("ssh: connect to host b port 22: Connection timed out", "no answer: it is down, or a firewall drops packets"),
        ("ssh: Could not resolve hostname b: Name or service not known", "its name does not resolve here"),
        ("ssh: connect to host b port 22: No route to host", "no route to it: the host or its network is down"),
        ("ModuleNotFoundError: No module named 'rankless'", "Rankless is not installed there"),
    ],
)
def test_messages_of_ssh_are_distinguished(message: str, seen: str):
    cause = find_ssh_cause(message, "b")
    assert cause is not None
    assert cause.seen.startswith(seen)
    assert "{" not in cause.fix


def test_the_table_shows_failures_first_and_groups_them_by_fix():
    rows = [
        *with_place([make_pass("memory", "enough"), make_warning("proxies", "set", "unset it")], "a"),
        *with_place([make_pass("memory", "enough"), make_failure("/dev/shm", "[small]", "make it large")], "b"),
        *with_place([make_failure("connection", "dropped", "open it")], "a → b"),
        *with_place([make_failure("connection", "dropped, too", "open it")], "b → a"),
    ]
    report = make_doctor_report(rows, places=["a", "b"], not_looked_at=["a collective"])
    shown = io.StringIO()
    render_doctor_report(report, shown)
    assert shown.getvalue() == (
        "b\n"
        "  FAIL  /dev/shm    [small]\n"
        "                    fix: make it large\n"
        "  PASS  memory      enough\n"
        "between the hosts\n"
        "  FAIL  a → b  connection  dropped\n"
        "                           fix: open it\n"
        "  FAIL  b → a  connection  dropped, too\n"
        "                           fix: open it\n"
        "a\n"
        "  WARN  proxies     set\n"
        "                    fix: unset it\n"
        "  PASS  memory      enough\n"
        "not checked: a collective\n"
        "2 causes found:\n"
        "  1. b: /dev/shm: [small]\n"
        "     fix: make it large\n"
        "  2. a → b, b → a: connection: dropped\n"
        "     fix: open it\n"
    )
    healthy = make_doctor_report(rows[:2], places=["a", "b"], not_looked_at=[])
    assert healthy.verdict == "healthy: 2 checks, 1 warning"


def test_many_passing_pairs_share_a_line_of_the_table():
    names = [f"h{number}" for number in range(6)]
    rows: list[CheckResult] = []
    for one, other in itertools.permutations(names, 2):
        rows += with_place([make_pass("connection", "reached")], f"{one} → {other}")
    rows += with_place([make_failure("speed", "stalls", "see the MTU")], "h0 → h5")
    report = make_doctor_report(rows, places=names, not_looked_at=[])
    shown = io.StringIO()
    render_doctor_report(report, shown)
    assert len(report.rows) == 31
    assert "  FAIL  h0 → h5   speed       stalls\n" in shown.getvalue()
    assert "  PASS  30 pairs  connection  for example h0 → h1: reached\n" in shown.getvalue()


@pytest.mark.slow
def test_one_host_gives_a_table_or_json_and_an_exit_code(tmp_path: Path):
    table = rankless("doctor", folder=tmp_path)
    assert table.returncode == 0, table.stdout + table.stderr
    lines = table.stdout.splitlines()
    assert lines[0] == "this host"
    assert any(re.match(r"  (PASS|WARN)  start of a job +2 workers, ", line) for line in lines)  # slow on a busy host
    assert lines[-1].startswith("healthy: ")
    assert (table.stderr, list(tmp_path.iterdir())) == ("", [])
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = shlex.join([sys.executable, "-m", "rankless", "doctor", "--quick", "--json", "--port", port])
        limited = ["bash", "-c", f"ulimit -n 100; exec {words}"]
        limited_run = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    results = check_result(limited_run.stdout, "doctor")
    assert limited_run.returncode == 1
    (cause,) = results["causes"]
    assert (cause["places"], cause["seen"]) == (["this host"], "open files: 100 per process (hard limit 100)")
    (taken_row,) = (row for row in results["rows"] if row["name"] == f"port {port}")
    assert taken_row["status"] == "warn"
    assert f"taken by process {os.getpid()}: " in taken_row["seen"]
    assert {"name", "place", "status", "seen", "fix"} == set(results["rows"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "a,a"], "a 2 times"),
        (["--hosts", "a:x"], "a number of workers from 1 up"),
        (["--port", "70000"], "--port from 1 to 65535"),
        (["-n", "0"], "at least 1 worker"),
        (["--hosts", "a", "--hostfile", "f"], "one way of naming the hosts"),
        (["--hostfile", "none"], "a file of hosts"),
        (["--jsn"], "did you mean --json?"),
    ],
)
@pytest.mark.ci_sample(3)
def test_an_invalid_command_line_exits_with_2(options: list[str], message: str, tmp_path: Path):
    done = rankless("doctor", *options, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
