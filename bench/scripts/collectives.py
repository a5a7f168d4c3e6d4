"""Measures blocks of checked collectives and of torch.distributed's alternately, in the same workers."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import rankless.collectives as collectives

parser = argparse.ArgumentParser()
parser.add_argument("operation", choices=["all_reduce", "all_gather_single"])
parser.add_argument("bytes", type=int)
parser.add_argument("--pairs", type=int, default=25)
parser.add_argument("--calls", type=int, default=100)
arguments = parser.parse_args()

dist.init_process_group()
tensor = torch.ones(arguments.bytes // 4)
whole = tensor.new_empty(tensor.numel() * dist.get_world_size())
calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "all_reduce": (lambda: collectives.all_reduce(tensor), lambda: dist.all_reduce(tensor)),
    "all_gather_single": (
        lambda: collectives.all_gather_single(whole, tensor),
        lambda: dist.all_gather_single(whole, tensor),
    ),
}
ours, peer = calls[arguments.operation]


def seconds_of(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(arguments.calls):
        call()
    return (time.perf_counter() - start) / arguments.calls


seconds_of(ours), seconds_of(peer)
times = []
for number in range(arguments.pairs):
    if number % 2 == 0:
        first = seconds_of(ours)
        times.append((first, seconds_of(peer)))
    else:
        first = seconds_of(peer)
        times.append((seconds_of(ours), first))
if dist.get_rank() == 0:
    Path("times.json").write_text(json.dumps(times))
dist.destroy_process_group()
