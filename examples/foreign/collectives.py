"""Each collective of torch.distributed once: on the world and on a group, synchronous, asynchronous, of objects."""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
mine = torch.randn(3, dtype=torch.float64)


def show(name, value):
    """Print every rank's value on rank 0, in the order of ranks."""
    all_ranks = [None] * size
    dist.all_gather_object(all_ranks, value)
    if rank == 0:
        print(name, [item.tolist() if isinstance(item, torch.Tensor) else item for item in all_ranks])


def rows(count=size):
    return torch.arange(2.0 * count) + 100 * rank


def on(group, name):
    """Run the collectives of tensors on `group`, by each rank's number in it."""
    members, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    count, root = len(members), members[-1]
    for async_op in (False, True):

        def done(work, waited=async_op):
            if waited:
                work.wait()
            else:
                assert work is None

        label = f"{name}{' async' if async_op else ''}"
        tensor = mine.clone()
        done(dist.broadcast(tensor, src=root, group=group, async_op=async_op))
        show(f"{label} broadcast", tensor)
        tensor = torch.empty(2)
        pieces = list(rows(count).chunk(count)) if rank == root else None
        done(dist.scatter(tensor, pieces, src=root, group=group, async_op=async_op))
        show(f"{label} scatter", tensor)
        pieces = [torch.empty(3, dtype=torch.float64) for _ in range(count)] if rank == root else None
        done(dist.gather(mine, pieces, dst=root, group=group, async_op=async_op))
        show(f"{label} gather", pieces and torch.stack(pieces))
        pieces = [torch.empty(3, dtype=torch.float64) for _ in range(count)]
        done(dist.all_gather(pieces, mine, group=group, async_op=async_op))
        show(f"{label} all_gather", torch.stack(pieces))
        tensor = mine.clone()
        done(dist.reduce(tensor, dst=root, group=group, async_op=async_op))
        show(f"{label} reduce", tensor if rank == root else None)
        tensor = mine.clone()
        done(dist.all_reduce(tensor, group=group, async_op=async_op))
        show(f"{label} all_reduce", tensor)
        tensor = torch.empty(2)
        done(dist.reduce_scatter(tensor, list(rows(count).chunk(count)), group=group, async_op=async_op))
        show(f"{label} reduce_scatter", tensor)
        pieces = [torch.empty(2) for _ in range(count)]
        done(dist.all_to_all(pieces, list(rows(count).chunk(count)), group=group, async_op=async_op))
        show(f"{label} all_to_all", torch.stack(pieces))
        tensor = torch.empty(2 * count)
        done(dist.all_to_all_single(tensor, rows(count), group=group, async_op=async_op))
        show(f"{label} all_to_all_single", tensor)
        tensor = torch.empty(3 * count, dtype=torch.float64)
        done(dist.all_gather_into_tensor(tensor, mine, group=group, async_op=async_op))
        show(f"{label} all_gather_into_tensor", tensor)
        tensor = torch.empty(2)
        done(dist.reduce_scatter_tensor(tensor, rows(count), group=group, async_op=async_op))
        show(f"{label} reduce_scatter_tensor", tensor)
        done(dist.barrier(group=group, async_op=async_op))
    assert members[place] == rank


on(dist.group.WORLD, "world")
on(dist.new_group(list(range(size))), "group")
alone = [dist.new_group([member]) for member in range(size)]
on(alone[rank], "alone")

for operator in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
    tensor = mine.clone()
    dist.all_reduce(tensor, op=operator)
    show(f"all_reduce {operator}", tensor)
for operator in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
    tensor = torch.tensor([0b1100 + rank, 0b1010 - rank])
    dist.all_reduce(tensor, op=operator)
    show(f"all_reduce {operator}", tensor)

objects = [{"rank": rank}, "text", (1, 2.5)] if rank == 0 else [None] * 3
dist.broadcast_object_list(objects, src=0)
show("broadcast_object_list", objects)
found = [None]
dist.scatter_object_list(found, [f"for rank {r}" for r in range(size)] if rank == 0 else None, src=0)
show("scatter_object_list", found)
found = [None] * size if rank == 0 else None
dist.gather_object({"from": rank}, found, dst=0)
show("gather_object", found)

if size > 1:
    tensor = mine.clone()
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    show("send and recv", tensor)
dist.destroy_process_group()
