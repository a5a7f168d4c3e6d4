"""Ranks that Horovod's own launcher has started rendezvous at its HTTP server, by its variables alone."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rankless.config.environment import python_path_at_start
from rankless.errors import JoinError
from rankless.extensions.horovod.launched_rendezvous import PATH, KeyValueClient, join_horovod_rendezvous
from rankless.extensions.horovodrun.launched_worker import HorovodWorker
from rankless.extensions.horovodrun.rendezvous_server import rendezvous_server
from rankless.runtime.rendezvous import join_at_tcp_address

TRAIN = """
import torch
import horovod.torch as hvd

for _ in range(2):
    hvd.init()
    ranks = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    small = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum, name="small")
    large = hvd.allreduce(torch.ones(1 << 18), op=hvd.Sum)
    print(*ranks, small.tolist(), large.sum().item() / (1 << 18))
    hvd.shutdown()
"""
JOB = """
import rankless, torch, torch.distributed
for _ in range(2):
    rankless.init()
    total = torch.tensor([rankless.rank() + 1.0])
    torch.distributed.all_reduce(total)
    print(rankless.rank(), total.item())
    rankless.shutdown()
"""
ELASTIC = {"HOROVOD_ELASTIC": "1"}
POD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""Variables of a whole machine, which horovodrun passes to all its workers."""


def start_worker(script: Path, port: int, ranks: tuple[int, ...], **more: str) -> subprocess.Popen[str]:
    """Start a worker as horovodrun does, without the variables of any other launcher."""
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in others and not name.startswith(("RANKLESS_", "HOROVOD_"))
    }
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    variables = {
        **{f"HOROVOD_{name}": str(number) for name, number in zip(names, ranks, strict=True)},
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
        env={**kept, **variables, "PYTHONPATH": python_path_at_start(), "OMP_NUM_THREADS": "1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_lines(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


def make_worker(port: int, rank: int, size: int = 2, seconds: float = 20.0) -> HorovodWorker:
    return HorovodWorker(rank=rank, world_size=size, address="127.0.0.1", port=port, timeout_seconds=seconds)


def join_error_of(worker: HorovodWorker) -> JoinError:
    with pytest.raises(JoinError) as caught:
        join_horovod_rendezvous(worker, lambda _text: None)
    return caught.value


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("size", "pod"), [(2, POD), pytest.param(3, {}, marks=pytest.mark.exhaustive)])
def test_a_script_of_horovod_inits_shuts_down_and_inits_again(size: int, pod: dict[str, str], tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    all_ranks = [(rank, size, rank, size, 0, 1) for rank in range(size)]
    with rendezvous_server("127.0.0.1") as port:
        workers = [start_worker(tmp_path / "train.py", port, ranks, **pod) for ranks in all_ranks]
        lines = [read_lines(each) for each in workers]
    total = size * (size + 1) / 2
    assert lines == [[f"{' '.join(map(str, ranks))} {[total, total]} {float(size)}"] * 2 for ranks in all_ranks]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_script_of_rankless_inits_shuts_down_and_inits_again(tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)
    with rendezvous_server("127.0.0.1") as port:
        workers = [start_worker(tmp_path / "job.py", port, (rank, 2, rank, 2, 0, 1)) for rank in range(2)]
        assert [read_lines(each) for each in workers] == [[f"{rank} 3.0"] * 2 for rank in range(2)]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_process_needs_no_server_and_an_elastic_worker_is_referred_to_rankless(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    alone = start_worker(tmp_path / "train.py", 1, (0, 1, 0, 1, 0, 1))
    elastic = start_worker(tmp_path / "train.py", 1, (0, 2, 0, 2, 0, 1), **ELASTIC)
    assert read_lines(alone) == ["0 1 0 1 0 1 [1.0, 1.0] 1.0"] * 2
    _, errors = elastic.communicate(timeout=120)
    assert elastic.returncode == 1
    assert "fix:      start it by `rankless horovodrun --min-np …`" in errors


def test_ranks_rendezvous_repeatedly_and_leave_no_value_on_the_server():
    with rendezvous_server("127.0.0.1") as port, ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            join = lambda rank: join_horovod_rendezvous(make_worker(port, rank, 3), print)  # noqa: E731
            joined = list(threads.map(join, range(3)))
            assert len({address for _, address in joined}) == 1
            assert [each.world_size for each in joined[0][0].participants] == [3, 3, 3]
            assert KeyValueClient(make_worker(port, 1), print).get() == b""


def test_an_absent_rank_0_is_named_in_notices_and_in_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(join_at_tcp_address, "NOTICE_AFTER_SECONDS", 0.05)
    texts: list[str] = []
    with rendezvous_server("127.0.0.1") as port, pytest.raises(JoinError) as caught:
        join_horovod_rendezvous(make_worker(port, 1, seconds=0.3), texts.append)
    assert "waiting for rank 0, which publishes its address there" in str(caught.value.found)
    assert "HOROVOD_START_TIMEOUT" in caught.value.fix
    assert len(texts) > 1
    assert f"http://127.0.0.1:{port}: waiting for rank 0" in texts[0]


def test_another_absent_rank_is_named_in_the_error():
    with rendezvous_server("127.0.0.1") as port:
        assert "waiting for rank 1 of 2" in str(join_error_of(make_worker(port, 0, seconds=0.3)).found)


def test_an_unreachable_server_is_named_with_its_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for rank in range(2):
            error = join_error_of(make_worker(port, rank, seconds=0.2))
            assert "Connection refused" in str(error.found)
            assert f"http://127.0.0.1:{port}" in str(error.expected)
            assert "check that the launcher is alive" in error.fix
            no_name = HorovodWorker(rank=rank, world_size=2, address="a..b", port=port)
            assert "http://a..b:" in str(join_error_of(no_name).expected)


class OtherServer(BaseHTTPRequestHandler):
    """A web server that knows nothing of Horovod."""

    def do_GET(self) -> None:
        self.send_error(503, "Out to Lunch")

    def log_message(self, *_: object) -> None:
        pass


def test_the_answer_of_another_server_at_that_address_is_quoted():
    server = HTTPServer(("127.0.0.1", 0), OtherServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert join_error_of(make_worker(server.server_port, 1, seconds=0.2)).found == "it says 503 Out to Lunch"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_value_that_rank_0_has_not_written_is_quoted():
    with rendezvous_server("127.0.0.1") as port:
        KeyValueClient(make_worker(port, 0), print).put(b"hello")
        error = join_error_of(make_worker(port, 1))
    assert error.found == "b'hello'"
    assert PATH in str(error.expected)
