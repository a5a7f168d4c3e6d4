"""Measures collectives of the default group in shared memory and of a Gloo group alternately, in the same workers.

The peer "bound" does what each rank of a group of two must at least do with its memory: copy its values to where the
other rank reads them, and add both ranks' values. It does so in pieces of the same size, and waits for nobody.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.alternating import measure_calls

PIECE_BYTES = 1 << 20
OPERATIONS = ["all_reduce", "all_reduce_allocated", "all_gather_single", "broadcast"]

parser = argparse.ArgumentParser()
parser.add_argument("cases", nargs="+", metavar="CASE", help=f"operation,bytes,peer,calls; {', '.join(OPERATIONS)}")
parser.add_argument("--pairs", type=int, default=15)
arguments = parser.parse_args()

dist.init_process_group()
world = dist.group.WORLD
assert dist.get_backend() == "shared_memory", "the ranks share no memory"
gloo = dist.new_group(backend="gloo")


def make_calls(operation: str, byte_count: int, peer: str) -> tuple[Callable[[], object], Callable[[], object]]:
    count = byte_count // 4
    tensor = torch.ones(count).zero_()  # sums of zeros stay zeros
    own = world.allocate(count, torch.float32) if operation == "all_reduce_allocated" else tensor
    whole = torch.ones(count * dist.get_world_size()) if operation == "all_gather_single" else tensor
    copied, other = (torch.ones(PIECE_BYTES // 4).zero_() for _ in range(2))

    def call(values: torch.Tensor, group: object) -> None:
        if operation == "all_gather_single":
            dist.all_gather_single(whole, values, group=group)
        elif operation == "broadcast":
            dist.broadcast(values, 0, group=group)
        else:
            dist.all_reduce(values, group=group)

    def touch_memory() -> None:
        for piece in tensor.split(PIECE_BYTES // 4):
            copied[: len(piece)].copy_(piece)
            torch.add(piece, other[: len(piece)], out=piece)

    return lambda: call(own, world), touch_memory if peer == "bound" else lambda: call(tensor, gloo)


times = []
for case in arguments.cases:
    operation, byte_count, peer, calls = case.split(",")
    assert operation in OPERATIONS, f"no operation called {operation}"
    ours, theirs = make_calls(operation, int(byte_count), peer)
    times.append(measure_calls(ours, theirs, pairs=arguments.pairs, calls=int(calls), warmup=int(calls)))
if dist.get_rank() == 0:
    Path("times.json").write_text(json.dumps(times))
dist.destroy_process_group()
