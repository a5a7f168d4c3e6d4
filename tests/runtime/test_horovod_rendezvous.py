"""Ranks that Horovod's own launcher has started meet at its HTTP server, with nothing but its variables."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rankless.config.environment import python_path_from
from rankless.config.horovod_variables import HorovodWorker
from rankless.errors import JoinError
from rankless.launchers.horovodrun.rendezvous_server import rendezvous_server
from rankless.runtime.hooks.import_aliases import AT_START
from rankless.runtime.rendezvous import horovod, tcp
from rankless.runtime.rendezvous.horovod import KeyValueServer, join_horovod_rendezvous

TRAIN = """
import torch
import horovod.torch as hvd

for _ in range(2):
    hvd.init()
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    small = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum, name="small")
    large = hvd.allreduce(torch.ones(1 << 18), op=hvd.Sum)
    print(*place, small.tolist(), large.sum().item() / (1 << 18))
    hvd.shutdown()
"""
JOB = """
import rankless, torch, torch.distributed
for _ in range(2):
    rankless.init()
    told = torch.tensor([rankless.rank() + 1.0])
    torch.distributed.all_reduce(told)
    print(rankless.rank(), told.item())
    rankless.shutdown()
"""
ELASTIC = {"HOROVOD_ELASTIC": "1"}
POD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""What is set for a machine as a whole: horovodrun hands it on to all its workers."""


def started(script: Path, port: int, seat: tuple[int, ...], **more: str) -> subprocess.Popen[str]:
    """A worker as horovodrun starts it, and nothing of another launcher in its environment."""
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in others and not name.startswith(("RANKLESS_", "HOROVOD_"))
    }
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    told = {
        **{f"HOROVOD_{name}": str(number) for name, number in zip(names, seat, strict=True)},
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
    return subprocess.Popen(
        [sys.executable, script.name],
        cwd=script.parent,
        env={**kept, **told, "PYTHONPATH": python_path_from(AT_START), "OMP_NUM_THREADS": "1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


def worker(port: int, rank: int, size: int = 2, seconds: float = 20.0) -> HorovodWorker:
    return HorovodWorker(rank=rank, world_size=size, address="127.0.0.1", port=port, timeout_seconds=seconds)


def refused(told: HorovodWorker) -> JoinError:
    with pytest.raises(JoinError) as caught:
        join_horovod_rendezvous(told, lambda _text: None)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pod"), [(2, POD), pytest.param(3, {}, marks=pytest.mark.exhaustive)])
def test_a_script_of_horovod_inits_shuts_down_and_inits_again(size: int, pod: dict[str, str], tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    seats = [(rank, size, rank, size, 0, 1) for rank in range(size)]
    with rendezvous_server("127.0.0.1") as port:
        workers = [started(tmp_path / "train.py", port, seat, **pod) for seat in seats]
        lines = [printed(each) for each in workers]
    total = size * (size + 1) / 2
    assert lines == [[f"{' '.join(map(str, seat))} {[total, total]} {float(size)}"] * 2 for seat in seats]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_so_does_a_script_of_ours(tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)
    with rendezvous_server("127.0.0.1") as port:
        workers = [started(tmp_path / "job.py", port, (rank, 2, rank, 2, 0, 1)) for rank in range(2)]
        assert [printed(each) for each in workers] == [[f"{rank} 3.0"] * 2 for rank in range(2)]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_process_needs_no_server_and_an_elastic_worker_is_sent_to_us(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    alone = started(tmp_path / "train.py", 1, (0, 1, 0, 1, 0, 1))
    elastic = started(tmp_path / "train.py", 1, (0, 2, 0, 2, 0, 1), **ELASTIC)
    assert printed(alone) == ["0 1 0 1 0 1 [1.0, 1.0] 1.0"] * 2
    _, said = elastic.communicate(timeout=120)
    assert elastic.returncode == 1
    assert "fix:      start it by `rankless horovodrun --min-np …`" in said


def test_ranks_meet_any_number_of_times_and_nothing_is_left():
    with rendezvous_server("127.0.0.1") as port, ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            met = list(threads.map(lambda rank: join_horovod_rendezvous(worker(port, rank, 3), print), range(3)))
            assert len({served for _, served in met}) == 1
            assert [each.world_size for each in met[0][0].arrived] == [3, 3, 3]
            assert KeyValueServer(worker(port, 1), print).get() == b""


def test_rank_0_that_never_comes_is_named_and_told_of_meanwhile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp, "TELL_AFTER_SECONDS", 0.05)
    said: list[str] = []
    with rendezvous_server("127.0.0.1") as port, pytest.raises(JoinError) as caught:
        join_horovod_rendezvous(worker(port, 1, seconds=0.3), said.append)
    assert "waiting for rank 0, which is to say there where it serves" in str(caught.value.found)
    assert "HOROVOD_START_TIMEOUT" in caught.value.fix
    assert len(said) > 1
    assert f"http://127.0.0.1:{port}: waiting for rank 0" in said[0]


def test_another_rank_that_never_comes_is_named():
    with rendezvous_server("127.0.0.1") as port:
        assert "waiting for rank 1 of 2" in str(refused(worker(port, 0, seconds=0.3)).found)


def test_a_server_that_is_not_there_is_told_with_its_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for rank in range(2):
            error = refused(worker(port, rank, seconds=0.2))
            assert "Connection refused" in str(error.found)
            assert f"http://127.0.0.1:{port}" in str(error.expected)
            assert "whether the launcher lives" in error.fix
            no_name = HorovodWorker(rank=rank, world_size=2, address="a..b", port=port)
            assert "http://a..b:" in str(refused(no_name).expected)


class Other(BaseHTTPRequestHandler):
    """A web server that knows nothing of Horovod."""

    def do_GET(self) -> None:
        self.send_error(503, "Out to Lunch")

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_at_that_address_is_told_by_what_it_says():
    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert refused(worker(server.server_port, 1, seconds=0.2)).found == "it says 503 Out to Lunch"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_value_that_is_not_rank_0s_is_shown():
    with rendezvous_server("127.0.0.1") as port:
        KeyValueServer(worker(port, 0), print).put(b"hello")
        error = refused(worker(port, 1))
    assert error.found == "b'hello'"
    assert horovod.PATH in str(error.expected)
