"""Measures collectives of the default group in shared memory and of a Gloo group alternately, in the same workers.

The peer "bound" does what each rank of a group of two must at least do with its memory: copy its values to where the
other rank reads them, and add both ranks' values. It does so in pieces of the same size, and waits for nobody.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.alternating import write_times

PIECE_BYTES = 1 << 20

parser = argparse.ArgumentParser()
parser.add_argument("operation", choices=["all_reduce", "all_reduce_allocated", "all_gather_single", "broadcast"])
parser.add_argument("bytes", type=int)
parser.add_argument("peer", choices=["gloo", "bound"])
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--calls", type=int, default=100)
arguments = parser.parse_args()

dist.init_process_group()
world = dist.group.WORLD
assert dist.get_backend() == "shared_memory", "the ranks share no memory"
gloo = dist.new_group(backend="gloo")
count = arguments.bytes // 4
tensor = torch.ones(count).zero_()  # sums of zeros stay zeros
own = world.allocate(count, torch.float32) if arguments.operation == "all_reduce_allocated" else tensor
whole = torch.ones(count * dist.get_world_size()) if arguments.operation == "all_gather_single" else tensor
calls: dict[str, Callable[[torch.Tensor, object], object]] = {
    "all_reduce": lambda values, group: dist.all_reduce(values, group=group),
    "all_reduce_allocated": lambda values, group: dist.all_reduce(values, group=group),
    "all_gather_single": lambda values, group: dist.all_gather_single(whole, values, group=group),
    "broadcast": lambda values, group: dist.broadcast(values, 0, group=group),
}
copied, other = (torch.ones(PIECE_BYTES // 4).zero_() for _ in range(2))


def touch_memory() -> None:
    for piece in tensor.split(PIECE_BYTES // 4):
        copied[: len(piece)].copy_(piece)
        torch.add(piece, other[: len(piece)], out=piece)


def ours() -> None:
    calls[arguments.operation](own, world)


def peer() -> None:
    if arguments.peer == "gloo":
        calls[arguments.operation](tensor, gloo)
    else:
        touch_memory()


write_times(ours, peer, pairs=arguments.pairs, calls=arguments.calls, warmup=arguments.calls)
dist.destroy_process_group()
