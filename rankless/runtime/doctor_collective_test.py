"""One host's process of the doctor's collective test: all hosts sum tensors with Gloo, as a job would."""

import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rankless.config import environment
from rankless.config.hosts_and_addresses import listen_on
from rankless.records.doctor_records import (
    MARK,
    AllReduceFailed,
    AllReduceResult,
    CheckTorch,
    CollectiveTestResult,
    CollectiveTestTask,
    RunAllReduce,
    ServeStore,
    StoreServedMessage,
    TorchImported,
)
from rankless.records.encoding import encode_json
from rankless.runtime.fast_exit import FastExit

SIZES_AND_TIMES = ((4 << 10, 20), (16 << 20, 3))
"""The bytes of each tensor, and how often the hosts sum it."""


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # what every process of ours is started with
    """Return the loop that carries out the tasks on standard input, until standard input ends."""
    return _serve


def _serve() -> None:
    store: Any = None  # torch's stubs have no stores
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=CollectiveTestTask)
        try:
            if isinstance(task, CheckTorch):
                _send_result(TorchImported())
            elif isinstance(task, ServeStore):
                store, port = _open_store(task.address)
                _send_result(StoreServedMessage(port=port))
            else:
                _send_result(_measure_all_reduce(task, store))
        except (RuntimeError, ValueError, OSError) as error:  # torch's own errors are RuntimeErrors
            _send_result(AllReduceFailed(text=str(error).strip().partition("\n")[0]))


def _open_store(address: str) -> tuple[Any, int]:
    # torch's store would listen on all interfaces.
    listening = listen_on(address)
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


def _measure_all_reduce(task: RunAllReduce, store: Any) -> AllReduceResult:
    environment.apply({"GLOO_SOCKET_IFNAME": task.interface})
    limit = timedelta(seconds=task.timeout_seconds)
    start = time.monotonic()
    if store is None:
        store = dist.TCPStore(task.address, task.port, timeout=limit)  # type: ignore[attr-defined]  # not in the stubs
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.size, timeout=limit)
    _sum_once(torch.ones(1), task.size)
    joined = time.monotonic() - start
    seconds = {}
    for byte_count, times in SIZES_AND_TIMES:
        tensor = torch.ones(byte_count // 4)
        seconds[byte_count] = statistics.median(_sum_once(tensor.fill_(1.0), task.size) for _ in range(times))
    return AllReduceResult(
        join_seconds=joined, seconds=seconds, torch=str(torch.__version__), cuda_devices=torch.cuda.device_count()
    )


def _sum_once(tensor: torch.Tensor, size: int) -> float:
    start = time.monotonic()
    dist.all_reduce(tensor)
    taken = time.monotonic() - start
    if not bool((tensor == size).all()):
        raise RuntimeError(f"the sum over {size} hosts is wrong: {tensor[tensor != size][0].item()}")
    return taken


def _send_result(result: CollectiveTestResult) -> None:
    sys.stdout.buffer.write(MARK + encode_json(result) + b"\n")
    sys.stdout.buffer.flush()
