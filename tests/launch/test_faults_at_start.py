"""What can go wrong before two hosts have started a job: it does not start, and every host says why."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import torch, torch.distributed as dist
open("started", "w").close()
dist.init_process_group()
while True:
    dist.all_reduce(torch.ones(1))
"""
RUN = [sys.executable, "-m", "rankless", "run"]
BY_HAND = ["--no-ssh", "--insecure"]


@dataclass(frozen=True, kw_only=True)
class StartFault:
    """Something that keeps a job from starting."""

    name: str
    expected: str
    """What host 0's report must have."""
    expected_there: str | None = None
    """What the other's must; None where it is not started."""
    options: tuple[str, ...] = tuple(BY_HAND)
    hosts: str = "{a}:1,{b}:1"
    there: tuple[str, ...] | None = None
    """The other host's options, if it has its own."""
    prepare: Callable[[Hosts, Path], dict[str, dict[str, str]]] | None = None
    """Done first; gives each host's environment."""
    meanwhile: Callable[[Hosts, Path], None] | None = None
    seconds: float = 5.0
    """Within so many, once all that is to come has come."""
    code: int = 2


def _token_files(_: Hosts, folder: Path) -> dict[str, dict[str, str]]:
    for name in ("a", "b"):
        (folder / f"token-{name}").write_text(name * 32)
    return {name: {"RANKLESS_TOKEN_FILE": str(folder / f"token-{name}")} for name in ("a", "b")}


def _other_torch(_: Hosts, folder: Path) -> dict[str, dict[str, str]]:
    fake = folder / "fake" / "torch-2.12.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    return {"b": {"PYTHONPATH": f"{fake.parent}:{Path(__file__).parents[2]}"}}


def _clock_ahead(_: Hosts, folder: Path) -> dict[str, dict[str, str]]:
    (folder / "clock").mkdir()
    (folder / "clock" / "sitecustomize.py").write_text(
        "import time\ntrue = time.time\ntime.time = lambda: true() + 120\n"
    )
    return {"b": {"PYTHONPATH": f"{folder / 'clock'}:{Path(__file__).parents[2]}"}}


def _no_key(hosts: Hosts, _: Path) -> dict[str, dict[str, str]]:
    shutil.move(hosts.folder / "authorized", hosts.folder / "authorized.away")
    return {}


def _unknown_host(hosts: Hosts, _: Path) -> dict[str, dict[str, str]]:
    shutil.move(hosts.folder / "known", hosts.folder / "known.away")
    return {}


def _cut(hosts: Hosts, _: Path) -> dict[str, dict[str, str]]:
    hosts.link("b", up=False)
    return {}


def _cut_while_starting(hosts: Hosts, folder: Path) -> None:
    wait_until(lambda: (folder / "log").exists())
    hosts.link("b", up=False)


def _port_taken(hosts: Hosts, folder: Path) -> dict[str, dict[str, str]]:
    words = "import socket, time; s = socket.create_server(('', 9944)); open('taken', 'w').close(); time.sleep(600)"
    hosts.start("a", [sys.executable, "-c", words], cwd=folder)
    wait_until(lambda: (folder / "taken").exists())
    return {}


FAULTS = [
    StartFault(
        name="another token",
        prepare=_token_files,
        options=("--no-ssh", "--join-timeout", "4"),
        expected="rejected a client at {b}: a different token",
        expected_there="do both have the same token",
        seconds=9,
    ),
    StartFault(
        name="another script",
        there=(*BY_HAND, "--seed", "0"),
        expected="the script main.py: {b} has another text",
        expected_there="the script main.py: {b} has another text",
    ),
    StartFault(
        name="another version of torch",
        prepare=_other_torch,
        expected=r"the version of torch: {b} has 2\.12\.0",
        expected_there=r"the version of torch: {b} has 2\.12\.0",
    ),
    StartFault(
        name="a clock that is ahead",
        prepare=_clock_ahead,
        expected="the clock: {b} has 1[12][0-9] s ahead",
        expected_there="the clock",
    ),
    StartFault(
        name="another list of hosts",
        there=(*BY_HAND, "--hosts", "{a}:1,{b}:2"),
        expected="the hosts of the job: {b} has",
        expected_there="the hosts of the job",
    ),
    StartFault(name="no ssh key", options=(), prepare=_no_key, expected="ssh asks for a password", seconds=5),
    StartFault(
        name="an unknown host key", options=(), prepare=_unknown_host, expected="the host's key is not known here"
    ),
    StartFault(
        name="a name that does not resolve", options=(), hosts="a:1,nowhere:1", expected="name does not resolve"
    ),
    StartFault(name="a host listed twice", options=(), hosts="a:1,b:1,a:2", expected="each host once[^$]*a 2 times"),
    StartFault(
        name="two hosts with one address", options=(), hosts="{a}:1,a:1", expected="which are both this one", seconds=3
    ),
    StartFault(name="a host that is not in the list", hosts="192.0.2.1,192.0.2.2", expected="this host among"),
    StartFault(
        name="a port that is taken",
        prepare=_port_taken,
        options=(*BY_HAND, "--port", "9944"),
        expected="port 9944 of {a} to be free.*\n.*taken by process [0-9]+: .*create_server",
    ),
    StartFault(
        name="a link that is down before the start",
        prepare=_cut,
        options=(*BY_HAND, "--join-timeout", "6"),
        expected=r"no answer from {b} \((no route to it|no answer)",
        expected_there="(no route to|no answer from) {a}",
        seconds=12,
    ),
    StartFault(
        name="a link that goes down while workers start",
        meanwhile=_cut_while_starting,
        expected="host {b} was lost: no heartbeat",
        expected_there="host 0, {a}, was lost: no heartbeat",
        code=1,
        seconds=12,
    ),
    StartFault(
        name="a host that does not come",
        options=(*BY_HAND, "--join-timeout", "6"),
        expected=r"waiting: 1/2 hosts, missing {b} \(it is up[^$]*all 2 hosts within 6 s",
        seconds=9,
    ),
]
IN_CI = {"another version of torch", "no ssh key", "a link that goes down while workers start"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture
def mended(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts, whole again afterwards."""
    yield hosts
    hosts.link("b", up=True)
    for name in ("authorized", "known"):
        if (hosts.folder / f"{name}.away").exists():
            shutil.move(hosts.folder / f"{name}.away", hosts.folder / name)


def _filled(words: tuple[str, ...] | list[str], hosts: Hosts) -> list[str]:
    a, b = hosts.addresses
    return [word.replace("{a}", a).replace("{b}", b) for word in words]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name, marks=[] if each.name in IN_CI else [pytest.mark.exhaustive]) for each in FAULTS],
)
def test_the_job_does_not_start_and_every_host_reports_why(fault: StartFault, mended: Hosts, tmp_path: Path):
    folders = {"a": tmp_path, "b": tmp_path}
    (tmp_path / "main.py").write_text(SCRIPT)
    if fault.name == "another script":
        folders["b"] = tmp_path / "there"
        folders["b"].mkdir()
        (folders["b"] / "main.py").write_text(SCRIPT + "\n")
    environments = fault.prepare(mended, tmp_path) if fault.prepare else {}
    began = time.time()
    options = {
        "a": ["--hosts", fault.hosts, *fault.options],
        "b": ["--hosts", fault.hosts, *(fault.there or fault.options)],
    }
    jobs = {
        name: mended.start(
            name, [*RUN, *_filled(options[name], mended), "main.py"], cwd=folders[name], env=environments.get(name)
        )
        for name in (("a", "b") if fault.expected_there else ("a",))
    }
    if fault.meanwhile is not None:
        fault.meanwhile(mended, tmp_path)
    expected = {name: (job.communicate(timeout=60)[1], job.returncode) for name, job in jobs.items()}
    seconds = time.time() - began
    a, b = map(re.escape, mended.addresses)
    rights = [re.search(_placed(fault.expected, a, b), expected["a"][0]) is not None]
    if fault.expected_there is not None:
        rights.append(re.search(_placed(fault.expected_there, a, b), expected["b"][0]) is not None)
    if "FAULTS_JSON" in os.environ:
        with open(os.environ["FAULTS_JSON"], "a") as rows:
            lines = max(len(err.splitlines()) for err, _ in expected.values())
            row = {"fault": fault.name, "hosts": 2, "workers": 1, "seconds": round(seconds, 2), "is_right": all(rights)}
            rows.write(json.dumps(row | {"lines": lines, "orphans": 0, "goal": fault.seconds, "phase": "start"}) + "\n")
    assert all(rights), expected
    assert {code for _, code in expected.values()} == {fault.code}
    assert fault.code == 1 or not (tmp_path / "started").exists()
    assert seconds < fault.seconds + 15


def _placed(pattern: str, a: str, b: str) -> str:
    return pattern.replace("{a}", a).replace("{b}", b)
