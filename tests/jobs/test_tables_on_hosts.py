"""Jobs with tables on the servers of two hosts: the same training as on one device, also after servers were killed."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs.test_table_runs import SCRIPT, read_forms
from support.hosts import Hosts, two_hosts
from support.warm_process import run_warm

pytestmark = pytest.mark.slow

LOSE_SERVERS = Path(__file__).parent / "scripts/lose_servers.py"
FORMS = "two tables,mean over padded positions"
RANKLESS = (sys.executable, "-m", "rankless")
BY_HAND = ("--no-ssh", "--insecure")
NUMBERED = ("run", "--insecure", "-n", "2", "--servers", "3", "--master", "a:9911", "--host-count", "2")
LINES = {
    "fleetrun": ("fleetrun", "--insecure", "--servers=a:6170,b:6171", "--workers=a,a,b,b"),
    "fleetrun with ports": (
        "fleetrun",
        "--insecure",
        "--servers=a:6170,b:6171",
        "--workers=a:6172,a:6173,b:6178,b:6179",
    ),
    "fleetrun with numbers": (
        *("fleetrun", "--insecure", "--server_num=1", "--worker_num=2", "--nnodes=2", "--master=a:9912"),
    ),
    "fleetrun, a host of servers": ("fleetrun", "--insecure", "--servers=b:6170,b:6171", "--workers=a:6172,a:6173"),
    "run by hand": ("run", *BY_HAND, "--servers", "b,a,10.77.0.2", "--workers", "a,a,b,b"),
    "hosts by hand": ("run", *BY_HAND, "--hosts", "a:2,b:2", "--servers", "1"),
}
"""Lines that a user types on both hosts."""
SSH_LINES = {
    "run": ("run", "--servers", "a:6170,b", "--encrypt-servers", "--workers", "a,a,b:6179,b"),
    "a host of servers": ("run", "--servers", "b:6170,b", "--workers", "a,a,a"),
    "hosts": ("run", "--hosts", "a:3,b:1", "--servers", "2"),
}
"""Lines that a user types on host a."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


def run_on_hosts(hosts: Hosts, folder: Path, lines: Sequence[Sequence[str]], *script: str) -> list[str]:
    """Type a line on host a, and perhaps one on host b. Returns what they write, without errors."""
    jobs = [hosts.start(name, [*RANKLESS, *line, *script], cwd=folder) for name, line in zip("ab", lines, strict=False)]
    texts = [job.communicate(timeout=240) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), texts
    return [out + err for out, err in texts]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    return read_forms(run_warm(SCRIPT, "--plain", "--optimizer", "adagrad", "--forms", FORMS))


def require_same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert list(found) == list(wanted) == FORMS.split(",")
    for form, numbers in wanted.items():
        assert found[form] == pytest.approx(numbers, rel=0, abs=1e-11), form


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LINES)
def test_a_line_typed_on_both_hosts_trains_as_one_device(name: str, hosts: Hosts, tmp_path: Path, plain):
    first, second = run_on_hosts(
        hosts, tmp_path, [LINES[name]] * 2, str(SCRIPT), "--optimizer", "adagrad", "--forms", FORMS
    )
    require_same(read_forms(first), plain)
    assert "{" not in second
    if name.startswith("fleetrun") and name != "fleetrun, a host of servers":
        for log in ("serverlog.0", "serverlog.1", "workerlog.0", "workerlog.3"):
            assert (tmp_path / "log" / log).exists()
        assert "TRAINING_ROLE" in first


@pytest.mark.exhaustive
def test_numbered_hosts_share_servers(hosts: Hosts, tmp_path: Path, plain):
    lines = [(*NUMBERED, "--host-rank", str(rank)) for rank in range(2)]
    first, second = run_on_hosts(hosts, tmp_path, lines, str(SCRIPT), "--optimizer", "adagrad", "--forms", FORMS)
    require_same(read_forms(first), plain)
    assert "ranks 2 to 3, server 2, logs" in second


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SSH_LINES)
def test_a_line_typed_on_the_first_host_trains_as_one_device(name: str, hosts: Hosts, tmp_path: Path, plain):
    (first,) = run_on_hosts(hosts, tmp_path, [SSH_LINES[name]], str(SCRIPT), "--optimizer", "adagrad", "--forms", FORMS)
    require_same(read_forms(first), plain)


FAULTLESS = """
import torch
import rankless

table = rankless.parameter_server.Embedding(4)
optimizer = torch.optim.Adagrad(table.parameters(), 0.1)

@rankless.job(model=table, optimizer=optimizer)
def train(ids):
    return table(ids).square().sum(1).mean()

for step in range(4):
    train(torch.arange(8) + step)
"""


@pytest.mark.exhaustive
def test_verify_compares_a_run_with_servers_on_two_hosts(hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(FAULTLESS)
    line = ("verify", "--servers", "a,b", "--workers", "a,b")
    (text,) = run_on_hosts(hosts, tmp_path, [line], "script.py")
    assert "same training" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tables_after_kills_on_both_hosts_are_bitwise_undisturbed(seed: int, hosts: Hosts, tmp_path: Path):
    line = ("run", "--servers", "a,b", "--workers", "a,b", "--seed", "1", "--no-progress", "--server-restarts", "200")
    results = []
    for kills in (0, 8):
        (text,) = run_on_hosts(hosts, tmp_path, [line], str(LOSE_SERVERS), str(kills), str(seed), "150")
        results.append(re.search(r"RESULT (\w+) (\d+)", text).groups())
    assert results[0][0] == results[1][0]
    assert [killed for _, killed in results] == ["0", "8"]
    assert {"server 0 on a was killed by SIGKILL", "server 1 on b was killed by SIGKILL"} & set(
        re.findall(r"server \d on \w was killed by SIGKILL", text)
    )
