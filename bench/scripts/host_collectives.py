"""Measures all_reduce of the hierarchical default group and of a Gloo group alternately, in the same workers."""

import argparse

import torch
import torch.distributed as dist

from bench.alternating import write_times

parser = argparse.ArgumentParser()
parser.add_argument("bytes", type=int)
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--calls", type=int, default=3)
arguments = parser.parse_args()

dist.init_process_group("gloo")
assert dist.get_backend() == "hierarchical", "the ranks do not reduce within their hosts first"
gloo = dist.new_group(backend="gloo")
tensor = torch.ones(arguments.bytes // 4).zero_()  # sums of zeros stay zeros

write_times(
    lambda: dist.all_reduce(tensor),
    lambda: dist.all_reduce(tensor, group=gloo),
    pairs=arguments.pairs,
    calls=arguments.calls,
    warmup=1,
)
dist.destroy_process_group()
