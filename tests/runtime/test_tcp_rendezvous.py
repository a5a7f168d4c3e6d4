"""Processes without a launcher rendezvous at an address or a file, and name the ranks that they wait for."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.jobs import wait_until
from support.warm_process import WarmProcess, wait_for
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

JOIN = """
import sys
import torch, rankless
import rankless.collectives as collectives

address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 1
open(f"arrived{rank}", "w").close()
for number in range(rounds):
    rankless.init(address, rank=rank, world_size=size, timeout_seconds=float(sys.argv[5]) if len(sys.argv) > 5 else 60)
    total = torch.tensor([float(rank + number)])
    collectives.all_reduce(total)
    print(rankless.rank(), rankless.world_size(), rankless.local_rank(), total.item(), flush=True)
    rankless.shutdown()
"""


def start(folder: Path, *arguments: object) -> WarmProcess:
    script = folder / "join.py"
    if not script.exists():  # a process that has just started may read it now
        script.write_text(JOIN)
    return WarmProcess(script, *arguments)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.exhaustive), "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/meet"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_processes_join_leave_and_join_again(size: int, address: str, tmp_path: Path):
    found = wait_for([start(tmp_path, address, rank, size, 3) for rank in range(size)])
    for rank, (code, out, err) in enumerate(found):
        assert code == 0, err
        sums = [float(sum(other + number for other in range(size))) for number in range(3)]
        assert out.splitlines() == [f"{rank} {size} {rank} {total}" for total in sums]


def test_a_waiting_rank_names_the_missing_one_and_times_out(address: str, tmp_path: Path):
    (code, out, err), *_ = wait_for([start(tmp_path, address, 0, 3, 1, 6), start(tmp_path, address, 2, 3, 1, 6)])
    assert (code, out) == (1, "")
    assert f"rankless: {address}: waiting for rank 1 of 3, 5 s" in err
    assert "JoinError" in err
    assert "waiting for rank 1 of 3, for 6." in err


@pytest.mark.exhaustive
def test_ranks_wait_for_one_that_starts_late(address: str, tmp_path: Path):
    early = [start(tmp_path, address, rank, 2 + 1) for rank in (1, 2)]
    wait_until(lambda: all((tmp_path / f"arrived{rank}").exists() for rank in (1, 2)))
    found = wait_for([start(tmp_path, address, 0, 3), *early])
    assert [code for code, _, _ in found] == [0, 0, 0], found


@pytest.mark.exhaustive
def test_ranks_with_different_world_sizes_raise(address: str, tmp_path: Path):
    found = wait_for([start(tmp_path, address, 0, 2, 1, 5), start(tmp_path, address, 1, 3, 1, 5)])
    assert any("all ranks with world_size=" in err and "found:    world_size=" in err for _, _, err in found), found
    assert all(code == 1 for code, _, _ in found)


@pytest.mark.exhaustive
def test_a_second_process_of_the_same_rank_raises(tmp_path: Path):
    address = f"file://{tmp_path}/meet"
    first = start(tmp_path, address, 0, 2)
    wait_until((tmp_path / "meet").exists)
    wait_until(lambda: (tmp_path / "meet").read_text() != "")
    (code, _, err), *_ = wait_for([start(tmp_path, address, 0, 2)])
    assert code == 1
    assert "one process as rank 0" in err
    assert str(first.pid) in err
    assert [code for code, _, _ in wait_for([first, start(tmp_path, address, 1, 2)])] == [0, 0]


@pytest.mark.exhaustive
def test_registrations_of_a_dead_run_are_ignored(tmp_path: Path):
    address = f"file://{tmp_path}/meet"
    dead = start(tmp_path, address, 0, 2)
    wait_until((tmp_path / "meet").exists)
    wait_until(lambda: (tmp_path / "meet").read_text() != "")
    dead.kill()
    text = (tmp_path / "meet").read_text()
    # As if it had been left some time ago.
    confirmed = text.rpartition('"confirmed":')[2].rstrip("}")
    (tmp_path / "meet").write_text(text.replace(confirmed, str(time.time() - 11)))
    found = wait_for([start(tmp_path, address, rank, 2) for rank in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found


@pytest.mark.exhaustive
def test_a_file_with_other_content_raises_and_is_not_changed(tmp_path: Path):
    (tmp_path / "meet").write_bytes(b"\0my thesis")
    (code, _, err), *_ = wait_for([start(tmp_path, f"file://{tmp_path}/meet", 0, 2)])
    assert code == 1
    assert "10 bytes of something else" in err
    assert (tmp_path / "meet").read_bytes() == b"\0my thesis"


def test_the_store_listens_on_the_given_address_only(tmp_path: Path):
    port = free_port()
    process = start(tmp_path, f"tcp://127.0.0.1:{port}", 0, 2)

    def listening() -> list[str]:
        found = psutil.Process(process.pid).net_connections(kind="tcp")
        return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port]

    wait_until(lambda: bool(listening()))
    assert listening() == ["127.0.0.1"]
    assert [code for code, _, _ in wait_for([process, start(tmp_path, f"tcp://127.0.0.1:{port}", 1, 2)])] == [0, 0]


@pytest.mark.exhaustive
def test_a_port_in_use_and_an_address_of_another_host_raise(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (code, _, err), *_ = wait_for([start(tmp_path, f"tcp://127.0.0.1:{port}", 0, 2)])
    assert code == 1
    assert "rank 0 to listen on 127.0.0.1" in err
    assert "in use" in err
    (code, _, err), *_ = wait_for([start(tmp_path, "tcp://192.0.2.7:29500", 0, 2)])
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


@pytest.mark.exhaustive
def test_without_an_address_the_launcher_decides_and_a_lone_process_is_a_job_of_one(tmp_path: Path):
    (tmp_path / "script.py").write_text(ALONE)
    alone = WarmProcess(tmp_path / "script.py").wait()
    assert (alone.stdout, alone.returncode) == ("0 1 [1.0, 1.0]\n" * 2, 0), alone.stderr
    job = run_script(ALONE, "-n", "2", folder=tmp_path)
    assert (job.stdout, job.returncode) == ("0 2 [2.0, 2.0]\n" * 2, 0), job.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["0 2 [2.0, 2.0]"] * 2 + ["1 2 [2.0, 2.0]"] * 2, done.stderr


INVALID_ADDRESSES = [
    ("tcp://127.0.0.1", 0, 2, "an address of the form tcp://HOST:PORT"),
    ("tcp://127.0.0.1:99999", 0, 2, "an address of the form tcp://HOST:PORT"),
    ("file://relative/path", 0, 2, "write a file with three slashes"),
    ("10.0.0.1:29500", 0, 2, "an address of the form tcp://HOST:PORT"),
    ("tcp://127.0.0.1:29500", 2, 2, "a rank from 0 to world_size - 1"),
]


INIT_ALL = """
import json, sys
import rankless
from rankless.errors import RanklessError

for address, rank, size, _words in json.loads(sys.argv[1]):
    try:
        rankless.init(address, rank=rank, world_size=size)
    except RanklessError as error:
        print(repr(str(error)))
"""


def test_invalid_addresses_raise(tmp_path: Path):
    (tmp_path / "init_all.py").write_text(INIT_ALL)
    done = WarmProcess(tmp_path / "init_all.py", json.dumps(INVALID_ADDRESSES)).wait()
    assert done.returncode == 0, done.stderr
    for error, (*_, words) in zip(done.stdout.splitlines(), INVALID_ADDRESSES, strict=True):
        assert words in error
