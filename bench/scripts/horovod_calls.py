"""Measures blocks of `hvd.allreduce` and of Gloo's own alternately, in the same workers."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist

from bench.pairs import measure

parser = argparse.ArgumentParser()
parser.add_argument("bytes", type=int)
parser.add_argument("--busy", action="store_true", help="run pure Python in the main thread until the result is there")
parser.add_argument("--pairs", type=int, default=25)
parser.add_argument("--calls", type=int, default=100)
arguments = parser.parse_args()

dist.init_process_group("gloo")
gloo = dist.new_group(backend="gloo")  # the default group may be another one of Rankless
hvd.init()
tensor = torch.ones(arguments.bytes // 4)


def count(turns: int) -> int:
    """Run pure Python for some microseconds."""
    total = 0
    for number in range(turns):
        total += number
    return total


def ours() -> None:
    handle = hvd.allreduce_async_(tensor, op=hvd.Min, name="measured")
    while arguments.busy and not hvd.poll(handle):
        count(50)
    hvd.synchronize(handle)


def peer() -> None:
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=gloo, async_op=True)
    while arguments.busy and not work.is_completed():
        count(50)
    work.wait()


def seconds_of(call: Callable[[], object]) -> Callable[[], float]:
    def measured() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(arguments.calls):
            call()
        return (time.perf_counter() - start) / arguments.calls

    return measured


times = measure(seconds_of(ours), seconds_of(peer), pairs=arguments.pairs)
if hvd.rank() == 0:
    Path("times.json").write_text(json.dumps(times))
hvd.shutdown()
dist.destroy_process_group()
