"""Measures blocks of checked collectives and of torch.distributed's alternately, in the same workers."""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

import rankless.collectives as collectives
from bench.alternating import write_times

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


write_times(ours, peer, pairs=arguments.pairs, calls=arguments.calls, warmup=arguments.calls)
dist.destroy_process_group()
