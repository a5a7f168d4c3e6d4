"""Processes that no launcher has started meet at an address or at a file, and say whom they wait for."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.jobs import wait_until
from support.warm_process import Preloaded
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

JOIN = """
import sys
import torch, rankless
import rankless.collectives as collectives

address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 1
open(f"came{rank}", "w").close()
for number in range(rounds):
    rankless.init(address, rank=rank, world_size=size, timeout_seconds=float(sys.argv[5]) if len(sys.argv) > 5 else 60)
    total = torch.tensor([float(rank + number)])
    collectives.all_reduce(total)
    print(rankless.rank(), rankless.world_size(), rankless.local_rank(), total.item(), flush=True)
    rankless.shutdown()
"""


def start(folder: Path, *arguments: object) -> Preloaded:
    (folder / "join.py").write_text(JOIN)
    return Preloaded(folder / "join.py", *arguments)


def ended(processes: list[Preloaded]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    return [(done.returncode, done.stdout, done.stderr) for done in [process.ended() for process in processes]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.exhaustive), "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/meet"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_processes_meet_join_leave_and_meet_again(size: int, address: str, tmp_path: Path):
    found = ended([start(tmp_path, address, rank, size, 3) for rank in range(size)])
    for rank, (code, out, err) in enumerate(found):
        assert code == 0, err
        sums = [float(sum(other + number for other in range(size))) for number in range(3)]
        assert out.splitlines() == [f"{rank} {size} {rank} {total}" for total in sums]


def test_who_waits_says_for_whom_and_gives_up_in_time(address: str, tmp_path: Path):
    (code, out, err), *_ = ended([start(tmp_path, address, 0, 3, 1, 6), start(tmp_path, address, 2, 3, 1, 6)])
    assert (code, out) == (1, "")
    assert f"rankless: {address}: waiting for rank 1 of 3, 5 s" in err
    assert "JoinError" in err
    assert "waiting for rank 1 of 3, for 6." in err


@pytest.mark.exhaustive
def test_a_rank_that_comes_late_is_waited_for(address: str, tmp_path: Path):
    early = [start(tmp_path, address, rank, 2 + 1) for rank in (1, 2)]
    wait_until(lambda: all((tmp_path / f"came{rank}").exists() for rank in (1, 2)))
    found = ended([start(tmp_path, address, 0, 3), *early])
    assert [code for code, _, _ in found] == [0, 0, 0], found


def test_ranks_that_expect_other_numbers_hear_of_it(address: str, tmp_path: Path):
    found = ended([start(tmp_path, address, 0, 2, 1, 5), start(tmp_path, address, 1, 3, 1, 5)])
    assert any("all ranks with world_size=" in err and "found:    world_size=" in err for _, _, err in found), found
    assert all(code == 1 for code, _, _ in found)


def test_one_rank_given_twice_is_refused(tmp_path: Path):
    address = f"file://{tmp_path}/meet"
    first = start(tmp_path, address, 0, 2)
    wait_until((tmp_path / "meet").exists)
    wait_until(lambda: (tmp_path / "meet").read_text() != "")
    (code, _, err), *_ = ended([start(tmp_path, address, 0, 2)])
    assert code == 1
    assert "one process as rank 0" in err
    assert str(first.pid) in err
    assert [code for code, _, _ in ended([first, start(tmp_path, address, 1, 2)])] == [0, 0]


def test_what_a_dead_run_has_left_in_the_file_is_recognised(tmp_path: Path):
    address = f"file://{tmp_path}/meet"
    dead = start(tmp_path, address, 0, 2)
    wait_until((tmp_path / "meet").exists)
    wait_until(lambda: (tmp_path / "meet").read_text() != "")
    dead.kill()
    text = (tmp_path / "meet").read_text()
    # As if it had been left some time ago.
    confirmed = text.rpartition('"confirmed":')[2].rstrip("}")
    (tmp_path / "meet").write_text(text.replace(confirmed, str(time.time() - 11)))
    found = ended([start(tmp_path, address, rank, 2) for rank in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found


@pytest.mark.exhaustive
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path):
    (tmp_path / "meet").write_bytes(b"\0my thesis")
    (code, _, err), *_ = ended([start(tmp_path, f"file://{tmp_path}/meet", 0, 2)])
    assert code == 1
    assert "10 bytes of something else" in err
    assert (tmp_path / "meet").read_bytes() == b"\0my thesis"


def test_the_store_listens_on_the_address_it_was_given_and_on_no_other(tmp_path: Path):
    port = free_port()
    process = start(tmp_path, f"tcp://127.0.0.1:{port}", 0, 2)

    def listening() -> list[str]:
        found = psutil.Process(process.pid).net_connections(kind="tcp")
        return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port]

    wait_until(lambda: bool(listening()))
    assert listening() == ["127.0.0.1"]
    assert [code for code, _, _ in ended([process, start(tmp_path, f"tcp://127.0.0.1:{port}", 1, 2)])] == [0, 0]


def test_a_port_that_is_taken_and_an_address_of_another_host_are_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (code, _, err), *_ = ended([start(tmp_path, f"tcp://127.0.0.1:{port}", 0, 2)])
    assert code == 1
    assert "rank 0 to listen on 127.0.0.1" in err
    assert "in use" in err
    (code, _, err), *_ = ended([start(tmp_path, "tcp://192.0.2.7:29500", 0, 2)])
    assert code == 1
    assert "Cannot assign requested address" in err


ALONE = """
import sys
import torch, rankless
import rankless.collectives as collectives
for _ in range(2):
    rankless.init()
    total = torch.ones(2)
    collectives.all_reduce(total)
    # One write: torchrun's processes share a terminal.
    sys.stdout.write(f"{rankless.rank()} {rankless.world_size()} {total.tolist()}\\n")
    rankless.shutdown()
"""


def test_without_an_address_the_launcher_says_and_alone_it_is_a_job_of_one(tmp_path: Path):
    (tmp_path / "script.py").write_text(ALONE)
    alone = Preloaded(tmp_path / "script.py").ended()
    assert (alone.stdout, alone.returncode) == ("0 1 [1.0, 1.0]\n" * 2, 0), alone.stderr
    job = run_script(ALONE, "-n", "2", folder=tmp_path)
    assert (job.stdout, job.returncode) == ("0 2 [2.0, 2.0]\n" * 2, 0), job.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["0 2 [2.0, 2.0]"] * 2 + ["1 2 [2.0, 2.0]"] * 2, done.stderr


BAD = [
    ("tcp://127.0.0.1", 0, 2, "an address as tcp://HOST:PORT"),
    ("tcp://127.0.0.1:99999", 0, 2, "an address as tcp://HOST:PORT"),
    ("file://relative/path", 0, 2, "a file has three slashes"),
    ("10.0.0.1:29500", 0, 2, "an address as tcp://HOST:PORT"),
    ("tcp://127.0.0.1:29500", 2, 2, "a rank from 0 to world_size - 1"),
]


TRYING = """
import json, sys
import rankless
from rankless.errors import RanklessError

for address, rank, size, _words in json.loads(sys.argv[1]):
    try:
        rankless.init(address, rank=rank, world_size=size)
    except RanklessError as error:
        print(repr(str(error)))
"""


def test_addresses_that_cannot_be_meant_are_refused(tmp_path: Path):
    (tmp_path / "trying.py").write_text(TRYING)
    tried = Preloaded(tmp_path / "trying.py", json.dumps(BAD)).ended()
    assert tried.returncode == 0, tried.stderr
    for said, (*_, words) in zip(tried.stdout.splitlines(), BAD, strict=True):
        assert words in said
