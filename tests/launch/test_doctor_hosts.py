"""The doctor between two hosts in network namespaces: it finds each injected fault and calls healthy hosts healthy."""

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hosts import ROOT, Hosts, two_hosts
from support.jobs import wait_until

from rankless.terminal.doctor_table import DoctorReport

pytestmark = pytest.mark.slow

PAIR = "10.77.0.1:2,10.77.0.2:2"
SKEWED = "import time\n_real = time.time\ntime.time = lambda: _real() + {seconds}\n"


def doctor(
    hosts: Hosts, *options: str, listed: str = PAIR, cwd: Path | None = None, **env: str
) -> tuple[DoctorReport, dict[str, str]]:
    """Return the report on host a, and the rows that did not pass, from "place name" to "seen; fix"."""
    words = [sys.executable, "-m", "rankless", "doctor", "--json", *options]
    done = hosts.run("a", [*words, *(("--hosts", listed) if listed else ())], cwd=cwd or hosts.folder, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = msgspec.json.decode(done.stdout, type=DoctorReport)
    assert done.returncode == (1 if report.causes else 0)
    assert not done.stderr, done.stderr
    for row in report.rows:
        assert row.seen, row
        assert (row.status == "pass") == (not row.fix), row
    problems = {f"{row.place} {row.name}": f"{row.seen}; {row.fix}" for row in report.rows if row.status != "pass"}
    return report, problems


def add_version(folder: Path, package: str, version: str) -> Path:
    """Return a folder which, first on the path, makes a package look like another version."""
    place = folder / "versions" / f"{package}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return place.parent


@pytest.mark.exhaustive
def test_two_healthy_hosts_are_healthy_and_no_process_remains(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        report, problems = doctor(hosts)
        slow = [name for name in problems if name.endswith("start of a job")]  # on a busy host
        assert report.verdict.startswith(f"healthy: {len(report.rows)} checks, {len(slow)} warning")
        assert list(problems) == slow
        assert report.not_looked_at == ()
        seen = {(row.place, row.name): row.seen for row in report.rows}
        there, back = "10.77.0.1 → 10.77.0.2", "10.77.0.2 → 10.77.0.1"
        assert seen[there, "connection"].startswith("reached at 10.77.0.2, port ")
        assert seen[back, "port 9988"] == "reached, for the rendezvous of the agents"
        for pair in (there, back):
            assert re.fullmatch(
                r"[\d.]+ (µs|ms) round trip, [\d.]+ [MG]bit/s \([\d.,]+ [MG]iB/s\)", seen[pair, "speed"]
            )
        assert re.match(
            r"4 KiB in [\d.]+ .s, 16 MiB in [\d.]+ .?s by Gloo over eth0; ", seen["all hosts", "all_reduce"]
        )
        assert re.match(r"2 workers, [\d.]+ s to", seen["10.77.0.1", "start of a job"])
        for place in ("10.77.0.1", "10.77.0.2"):
            assert "torch 2.13" in seen[place, "versions"]
            assert seen[place, "network card"].startswith("eth0 (10.77.0.")
        assert remaining_processes(hosts, "a") == remaining_processes(hosts, "b") == []


def remaining_processes(hosts: Hosts, name: str) -> list[str]:
    """Return the processes on a host other than its sshd."""
    numbers = hosts.run(name, ["ip", "netns", "pids", hosts.namespace(name)]).stdout.split()
    found = []
    for number in numbers:
        path = Path("/proc") / number / "cmdline"
        words = path.read_bytes().replace(b"\0", b" ").decode() if path.exists() else ""
        if words and "sshd" not in words and "netns pids" not in words:
            found.append(words)
    return found


def test_simultaneous_faults_are_all_reported_with_their_fixes(tmp_path: Path):
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(SKEWED.format(seconds=100))
    other = add_version(tmp_path, "torch", "2.12.0")
    with two_hosts(
        tmp_path,
        before={"b": "ulimit -n 100; mount -t tmpfs -o size=1m tmpfs /dev/shm"},
        logins={"b": {"PYTHONPATH": f"{other}:{tmp_path / 'ahead'}:{ROOT}"}},
    ) as hosts:
        hosts.names("b", "127.0.0.1 localhost\n127.0.1.1 b\n10.77.0.1 a\n")
        owner = hosts.start("a", [sys.executable, "-c", LISTENING, "9988"])
        assert owner.stdout is not None
        assert owner.stdout.readline() == "listening\n"
        report, problems = doctor(hosts, "--quick", http_proxy="http://me:secret@proxy.example:3128")
    a, b = "10.77.0.1", "10.77.0.2"
    assert f"process {owner.pid}: " in problems[f"{a} port 9988"]
    assert "--port 9989" in problems[f"{a} port 9988"]
    assert "1 MiB free of 1 MiB" in problems[f"{b} /dev/shm"]
    assert "--shm-size" in problems[f"{b} /dev/shm"] or "mount -o remount" in problems[f"{b} /dev/shm"]
    assert "100 per process" in problems[f"{b} open files"]
    assert "ulimit -n 65536" in problems[f"{b} open files"]
    assert problems[f"{b} version of torch"].startswith("2.12.0, but 10.77.0.1 has 2.13")
    assert re.match(r"(99|100) s ahead of this host's", problems[f"{b} clock"])
    assert "127.0.1.1" in problems[f"{b} own name"]
    assert "10.77.0.2 b" in problems[f"{b} own name"]
    assert "http_proxy=http://…@proxy.example:3128" in problems[f"{a} proxies"]
    assert "no_proxy=10.77.0.2" in problems[f"{a} proxies"]
    assert "secret" not in str(report)
    assert len(problems) == 7
    assert (len(report.causes), report.warnings) == (5, 2)
    assert report.verdict == "5 causes found:"


LISTENING = """
import socket, sys, time
taken = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        (("--quick",), ()),
        pytest.param((), ("a collective of all hosts: fix the failures above first",), marks=pytest.mark.exhaustive),
    ],
)
def test_a_firewall_that_allows_only_ssh_is_one_cause_for_all_pairs(
    options: tuple[str, ...], skipped: tuple[str, ...], tmp_path: Path
):
    with two_hosts(tmp_path) as hosts:
        hosts.firewall("b")
        report, _ = doctor(hosts, *options)
    (cause,) = report.causes
    assert "no answer from 10.77.0.2:" in cause.seen
    assert cause.places == ("10.77.0.1 → 10.77.0.2", "10.77.0.2 → 10.77.0.1")
    assert cause.fix.startswith("open all TCP ports between 10.77.0.1 and 10.77.0.2")
    assert report.not_looked_at == skipped


@pytest.mark.exhaustive
def test_a_killed_doctor_leaves_no_process_on_the_hosts(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        words = [sys.executable, "-m", "rankless", "doctor", "--hosts", PAIR]
        killed = hosts.start("a", words, cwd=tmp_path)
        wait_until(lambda: any("probe_server" in each for each in remaining_processes(hosts, "b")))
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        wait_until(lambda: not remaining_processes(hosts, "b") and not remaining_processes(hosts, "a"))
        interrupted = hosts.start("a", words, cwd=tmp_path)
        wait_until(lambda: any("probe_server" in each for each in remaining_processes(hosts, "b")))
        os.kill(interrupted.pid, signal.SIGINT)
        _, errors = interrupted.communicate(timeout=20)
        assert (interrupted.returncode, errors) == (130, "")
        wait_until(lambda: not remaining_processes(hosts, "b") and not remaining_processes(hosts, "a"))


@dataclass
class InjectedFault:
    """A fault to inject, and what the doctor must report."""

    row: str
    """The row that must report it, as "place name"."""
    pattern: str
    """A regular expression for what is seen and the fix."""
    inject: Callable[[Hosts], object] = lambda _: None
    listed: str = PAIR
    host_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `two_hosts`."""
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ("--quick",)
    fails: bool = True
    is_only_problem: bool = True


def remove_authorized_keys(hosts: Hosts) -> None:
    (hosts.folder / "authorized").write_text("")


def remove_known_hosts(hosts: Hosts) -> None:
    (hosts.folder / "known").write_text("")


def change_host_key(hosts: Hosts) -> None:
    known = (hosts.folder / "known").read_text().split()[0]
    (hosts.folder / "known").write_text(f"{known} {(hosts.folder / 'user.pub').read_text()}")


def set_names_on_b(*lines: str) -> Callable[[Hosts], None]:
    return lambda hosts: hosts.names("b", "\n".join(["127.0.0.1 localhost", *lines, ""]))


def give_a_two_address_families(hosts: Hosts) -> None:
    hosts.names("b", "127.0.0.1 localhost\n10.77.0.1 a\nfd77::1 a\n10.77.0.2 b\n")
    hosts.ip("b", "address", "add", "fd77::2/64", "dev", "eth0", "nodad")
    hosts.ip("b", "route", "replace", "unreachable", "fd77::1/128")


def drop_large_packets(hosts: Hosts) -> None:
    # The card at the other end silently drops packets longer than its MTU if they arrive without segmentation offload.
    hosts.ip("a", "link", "set", "eth0", "gso_max_segs", "1")
    hosts.ip("a", "link", "set", "eth0", "mtu", "9000")
    hosts.ip("b", "link", "set", "eth0", "mtu", "9000")
    for name in "ab":
        hosts.ip("n", "link", "set", f"to-{name}", "mtu", "8000")


def add_docker(hosts: Hosts) -> None:
    for name in "ab":
        hosts.ip(name, "link", "add", "docker0", "type", "bridge")


FAULTS = {
    "no key": InjectedFault("10.77.0.2 ssh", "asks for a password.*ssh-copy-id 10.77.0.2", remove_authorized_keys),
    "unknown host key": InjectedFault(
        "10.77.0.2 ssh", "key is not known here.*ssh-keyscan 10.77.0.2", remove_known_hosts
    ),
    "changed host key": InjectedFault("10.77.0.2 ssh", "key differs.*ssh-keygen -R 10.77.0.2", change_host_key),
    "no sshd": InjectedFault("10.77.0.2 ssh", "no sshd listens.*start sshd there", host_options={"sshd": ("a",)}),
    "no such name": InjectedFault("nowhere ssh", "does not resolve here.*/etc/hosts", listed="10.77.0.1,nowhere"),
    "cable": InjectedFault("10.77.0.2 ssh", "(no route to it|no answer: it is down)", lambda h: h.link("b", up=False)),
    "no route": InjectedFault(
        "10.99.0.9 ssh", "network of this host is down or lacks the route.*ip route", listed="10.77.0.1,10.99.0.9"
    ),
    "firewall": InjectedFault("10.77.0.2 ssh", "firewall drops.*port 22", lambda h: h.firewall("b", open_ports=())),
    "control port": InjectedFault(
        "10.77.0.2 → 10.77.0.1 port 9988",
        "no answer from 10.77.0.1:9988.*open TCP port 9988 on 10.77.0.1, or choose another",
        lambda h: h.firewall("a", closed_port=9988),
    ),
    "one host twice": InjectedFault("a hosts", "a and 10.77.0.1 are the same host.*a:3", listed="a:2,10.77.0.1:1,b:1"),
    "another host twice": InjectedFault("b hosts", "b and 10.77.0.2 are the same host.*b:3", listed="a,b:2,10.77.0.2"),
    "name there unknown": InjectedFault(
        "b network card",
        "the name a does not resolve here.*/etc/hosts",
        set_names_on_b("10.77.0.2 b"),
        listed="a,b",
        is_only_problem=False,
    ),
    "name there wrong": InjectedFault(
        "b network card",
        "a resolves to this host itself here",
        set_names_on_b("10.77.0.2 a b"),
        listed="a,b",
        is_only_problem=False,
    ),
    "two families": InjectedFault(
        "b → a port 9988",
        r"reached, but a also resolves to fd77::1 \(No route to host\) there.*remove fd77::1 from the addresses of a",
        give_a_two_address_families,
        listed="a,b",
        fails=False,
    ),
    "large packets": InjectedFault("10.77.0.1 → 10.77.0.2 speed", "large ones do not.*MTU", drop_large_packets),
    "card named that is not there": InjectedFault(
        "10.77.0.1 network card",
        "GLOO_SOCKET_IFNAME=eth7 matches no card here.*unset GLOO_SOCKET_IFNAME",
        env={"GLOO_SOCKET_IFNAME": "eth7"},
        is_only_problem=False,
    ),
    "virtual card named": InjectedFault(
        "10.77.0.1 network card",
        "NCCL_SOCKET_IFNAME=docker selects docker0, but eth0 .* reaches 10.77.0.2; virtual cards skipped: docker0",
        add_docker,
        env={"NCCL_SOCKET_IFNAME": "docker"},
        fails=False,
        is_only_problem=False,
    ),
    "not on the list": InjectedFault("this host hosts", "is not one of 10.77.0.2", listed="10.77.0.2", fails=False),
    "loopback down": InjectedFault(
        "this host network card", "lo is down", lambda h: h.ip("a", "link", "set", "lo", "down"), listed=""
    ),
    "by hand": InjectedFault(
        "10.77.0.2 from here",
        "(no route to it|no answer: it is down)",
        lambda h: h.link("b", up=False),
        options=("--no-ssh", "--quick"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "no key" else pytest.mark.exhaustive) for name in FAULTS]
)
def test_an_injected_fault_is_found(name: str, tmp_path: Path):
    fault = FAULTS[name]
    with two_hosts(tmp_path, **fault.host_options) as hosts:
        fault.inject(hosts)
        report, problems = doctor(hosts, *fault.options, listed=fault.listed, **fault.env)
    assert re.search(fault.pattern, problems[fault.row]), problems
    assert bool(report.causes) == fault.fails
    assert len(problems) == 1 or not fault.is_only_problem, problems


@pytest.mark.exhaustive
@pytest.mark.parametrize("missing", ["folder", "interpreter"])
def test_a_missing_folder_or_interpreter_is_named(missing: str, tmp_path: Path):
    shared = tmp_path / "shared"
    (shared / "work").mkdir(parents=True)
    hidden = shared if missing == "folder" else Path(sys.executable).parent
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(tmp_path, before={"b": f"mount -t tmpfs tmpfs {hidden}"}))
        _, problems = doctor(hosts, "--quick", cwd=shared / "work")
    path = shared / "work" if missing == "folder" else sys.executable
    assert problems["10.77.0.2 ssh"].startswith(f"the {missing} {path} does not exist there"), problems


@pytest.mark.exhaustive
def test_hosts_with_only_ipv6_are_healthy(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        known = (hosts.folder / "known").read_text()
        (hosts.folder / "known").write_text(f"fd77::1,fd77::2,{known}")
        for name, address in (("a", "fd77::1/64"), ("b", "fd77::2/64")):
            hosts.ip(name, "address", "flush", "dev", "eth0")
            hosts.ip(name, "address", "add", address, "dev", "eth0", "nodad")
        report, problems = doctor(hosts, listed="[fd77::1]:1,[fd77::2]:1")
    assert not report.causes, problems
    assert {row.place for row in report.rows if row.name == "all_reduce"} == {"all hosts"}
