"""Collectives on tensors among the workers of a mesh, or those along one of its axes.

Each function takes this rank's part, and returns this rank's part of the result. `start_all_reduce` and `broadcast`
change their input, and `start_all_gather` and `start_reduce_scatter` write to a tensor of the caller's; the others do
neither. Shards may be uneven: `lengths` holds each rank's number of rows along `dim`.
Among one process each function is the identity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.parallel.mesh import WorkerGroup
from rankless.torch_versions import find_function


def all_reduce(tensor: Tensor, *, among: WorkerGroup) -> Tensor:
    """Return the sum of all ranks' tensors on every rank."""
    if among.group is None:
        return tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=among.group)
    return result


def start_all_reduce(tensor: Tensor, *, among: WorkerGroup) -> dist.Work | None:
    """Begin to sum a contiguous `tensor` over all ranks in place. Return the work to wait for, if there is any."""
    if among.group is None:
        return None
    work: dist.Work = dist.all_reduce(tensor, group=among.group, async_op=True)
    return work


def all_reduce_maximum(tensor: Tensor, *, among: WorkerGroup) -> Tensor:
    """Return the maximum of all ranks' tensors on every rank."""
    if among.group is None:
        return tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, dist.ReduceOp.MAX, group=among.group)
    return result


def wait_for_all(*, among: WorkerGroup) -> None:
    """Return when all ranks have called this."""
    if among.group is not None:
        dist.barrier(group=among.group)


def await_end(work: dist.Work) -> None:
    """Return when a collective of a call that an exception has ended is over. Its error was that call's."""
    with suppress(RuntimeError):
        work.wait()


def start_all_gather(flat: Tensor, chunk: Tensor, *, among: WorkerGroup) -> dist.Work | None:
    """Begin to gather equal chunks of all ranks into `flat`. Return the work to wait for, if there is any.

    Both are contiguous and 1-dim. The chunk may be this rank's part of `flat`.
    """
    if among.group is None:
        flat[: chunk.numel()].copy_(chunk)
        return None
    work: dist.Work = find_function(dist, "all_gather_single")(flat, chunk, group=among.group, async_op=True)
    return work


def start_reduce_scatter(chunk: Tensor, flat: Tensor, *, among: WorkerGroup) -> dist.Work | None:
    """Begin to sum `flat` over all ranks; each gets its part in `chunk`. Return the work to wait for, if there is any.

    Both are contiguous and 1-dim. All ranks have equal parts of `flat`, in the order of ranks.
    """
    if among.group is None:
        chunk.copy_(flat[: chunk.numel()])
        return None
    work: dist.Work = find_function(dist, "reduce_scatter_single")(chunk, flat, group=among.group, async_op=True)
    return work


def all_gather(tensor: Tensor, *, among: WorkerGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return the whole tensor: the rows of all ranks along `dim`, in the order of ranks."""
    if among.group is None:
        return tensor
    leading = tensor.movedim(dim, 0)
    longest = max(lengths)
    padded = leading.new_empty((longest, *leading.shape[1:]))
    padded[: leading.shape[0]] = leading
    pieces = leading.new_empty((among.size * longest, *leading.shape[1:]))
    # Gloo and NCCL take equal pieces only, so all are padded to the longest, and cut afterwards.
    find_function(dist, "all_gather_single")(pieces, padded, group=among.group)
    if all(length == longest for length in lengths):
        whole = pieces
    else:
        whole = torch.cat([pieces[rank * longest :][:length] for rank, length in enumerate(lengths)])
    return whole.movedim(0, dim).contiguous()


def reduce_scatter(tensor: Tensor, *, among: WorkerGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return this rank's rows along `dim` of the sum of all ranks' tensors."""
    if among.group is None:
        return tensor
    leading = tensor.movedim(dim, 0)
    longest, shape = max(lengths), leading.shape[1:]
    if all(length == longest for length in lengths):
        padded = leading.contiguous()
    else:  # equal pieces only, as in `all_gather`
        padded = leading.new_zeros((among.size, longest, *shape))
        for piece, part in zip(padded, leading.split(list(lengths)), strict=True):
            piece[: part.shape[0]] = part
    summed = leading.new_empty((longest, *shape))
    if summed.numel():
        parts = summed, padded.resolve_conj()
        own, given = (torch.view_as_real(item) if item.is_complex() else item for item in parts)
        find_function(dist, "reduce_scatter_single")(own.view(-1), given.view(-1), group=among.group)
    return summed[: lengths[among.rank]].movedim(0, dim).contiguous()


def all_to_all(
    tensor: Tensor,
    *,
    among: WorkerGroup,
    from_dim: int,
    from_lengths: Sequence[int],
    to_dim: int,
    to_lengths: Sequence[int],
) -> Tensor:
    """Return this rank's rows along `to_dim` of a tensor that is split along `from_dim`."""
    if among.group is None:
        return tensor
    parts = tensor.split(list(to_lengths), dim=to_dim)
    sent = torch.cat([part.reshape(-1) for part in parts])
    shapes = []
    for length in from_lengths:
        shape = list(tensor.shape)
        shape[from_dim], shape[to_dim] = length, to_lengths[among.rank]
        shapes.append(shape)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = tensor.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=sizes,
        input_split_sizes=[part.numel() for part in parts],
        group=among.group,
    )
    pieces = [piece.reshape(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]
    return torch.cat(pieces, dim=from_dim)


def gather_to(
    tensors: Sequence[Tensor],
    *,
    among: WorkerGroup,
    dims: Sequence[int],
    lengths: Sequence[Sequence[int]],
    targets: Sequence[int],
) -> list[Tensor]:
    """Gather several tensors at once, each on one rank; return them, and tensors without rows in place of the others.

    Args:
        tensors: This rank's rows of each, of one dtype and device.
        among: The workers.
        dims: The dim of each tensor that is divided.
        lengths: The number of rows that each rank has of each tensor.
        targets: The rank that gets each tensor.
    """
    if among.group is None:
        return list(tensors)
    rows = [tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)]
    row_sizes = [torch.Size(each.shape[1:]).numel() for each in rows]
    order = sorted(range(len(rows)), key=targets.__getitem__)
    own = [number for number in order if targets[number] == among.rank]
    sent = [sum(rows[number].numel() for number in order if targets[number] == rank) for rank in range(among.size)]
    sizes = [[lengths[number][rank] * row_sizes[number] for number in own] for rank in range(among.size)]
    received = tensors[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received,
        torch.cat([rows[number].reshape(-1) for number in order]),
        output_split_sizes=list(map(sum, sizes)),
        input_split_sizes=sent,
        group=among.group,
    )
    pieces = received.split([size for each in sizes for size in each])
    found = [tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors]
    for place, number in enumerate(own):
        whole = torch.cat(pieces[place :: len(own)]).view(-1, *rows[number].shape[1:])
        found[number] = whole.movedim(0, dims[number]).contiguous()
    return found


def reduce_to(tensor: Tensor, *, among: WorkerGroup, target: int) -> Tensor:
    """Return the sum of all ranks' tensors on rank `target`, and a tensor without rows on the others."""
    if among.group is None:
        return tensor
    own = among.rank == target
    received = tensor.new_empty(tensor.numel() * among.size if own else 0)
    dist.all_to_all_single(
        received,
        tensor.reshape(-1),
        output_split_sizes=[tensor.numel() if own else 0] * among.size,
        input_split_sizes=[tensor.numel() if rank == target else 0 for rank in range(among.size)],
        group=among.group,
    )
    if not own:
        return tensor.new_empty((0, *tensor.shape[1:]) if tensor.dim() else ())
    return received.view(among.size, *tensor.shape).sum(0, dtype=tensor.dtype)


def send_along(
    tensor: Tensor, targets: Sequence[int], sizes: Sequence[int], *, among: WorkerGroup
) -> dict[int, Tensor]:
    """Return the flat tensors of the ranks that send theirs to this one, by rank. Each rank sends its own once.

    Args:
        tensor: This rank's tensor, with one dim.
        targets: For each rank the one that gets its tensor.
        sizes: The number of elements of each rank's tensor.
        among: The ranks.
    """
    sizes = [size if target == among.rank else 0 for target, size in zip(targets, sizes, strict=True)]
    received = tensor.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        tensor,
        output_split_sizes=sizes,
        input_split_sizes=[tensor.numel() if rank == targets[among.rank] else 0 for rank in range(among.size)],
        group=among.group,
    )
    return {rank: part for rank, part in enumerate(received.split(sizes)) if targets[rank] == among.rank}


def scatter_from(
    tensor: Tensor, *, among: WorkerGroup, dim: int, lengths: Sequence[int], source: int, shape: Sequence[int]
) -> Tensor:
    """Return this rank's rows along `dim` of the tensor of rank `source`.

    Args:
        tensor: The whole tensor on rank `source`; elsewhere one of its dtype and device.
        among: The workers.
        dim: The dim that is divided.
        lengths: The number of rows of each rank.
        source: The rank that has the tensor.
        shape: The shape of the whole tensor.
    """
    if among.group is None:
        return tensor
    own = list(shape)
    own[dim] = lengths[among.rank]
    received = tensor.new_empty(own)
    is_source = among.rank == source
    parts = [part.reshape(-1) for part in tensor.split(list(lengths), dim)] if is_source else []
    dist.all_to_all_single(
        received.view(-1),
        torch.cat(parts) if parts else tensor.new_empty(0),
        output_split_sizes=[received.numel() if rank == source else 0 for rank in range(among.size)],
        input_split_sizes=[part.numel() for part in parts] or [0] * among.size,
        group=among.group,
    )
    return received


@dataclass(frozen=True)
class PendingShift:
    """A tensor on its way from the rank before this one.

    Args:
        value: Its memory.
        device: Where it belongs, if that is not where its memory is.
        works: What fills it, and sends this rank's tensor.
        sent: This rank's tensor, whose memory must stay until it is sent.
    """

    value: Tensor
    works: tuple[dist.Work, ...] = ()
    sent: Tensor | None = None
    device: torch.device | None = None

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived. The next operator may overwrite what this rank has sent."""
        for work in self.works:
            work.wait()
        return self.value if self.device is None else self.value.to(self.device)


def start_ring_shift(tensor: Tensor, *, among: WorkerGroup, dim: int, lengths: Sequence[int]) -> PendingShift:
    """Begin to send a tensor to the next rank, from the last one to the first, and to receive that of the rank before.

    Args:
        tensor: This rank's tensor. It must not change before the shift has ended.
        among: The ranks, in the order of the ring.
        dim: The dim in which the tensors of different ranks may have different lengths.
        lengths: Each rank's length in this dim, before the shift.

    Returns:
        The shift. Its `wait` returns the contiguous tensor of the rank before.
    """
    if among.group is None:
        return PendingShift(tensor)
    shape = list(tensor.shape)
    shape[dim] = lengths[among.rank - 1]
    device = tensor.device if is_copied(tensor, among.group) else None
    sent = tensor.contiguous() if device is None else tensor.contiguous().cpu()
    received = sent.new_empty(shape)
    # Something is sent in place of an empty tensor: Gloo does not report one, and NCCL wants all ranks to take part.
    outgoing, incoming = (item if item.numel() else item.new_zeros(1) for item in (sent, received))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=among.group, group_peer=(among.rank + 1) % among.size),
            dist.P2POp(dist.irecv, incoming, group=among.group, group_peer=(among.rank - 1) % among.size),
        ]
    )
    return PendingShift(received, tuple(works), outgoing, device)


# Note [copied messages]: Gloo writes memory of the host to a socket. A tensor on a GPU, of workers that share it, is
# copied there and back.


def is_copied(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether messages of a tensor go through a copy in memory of the host."""
    return tensor.device.type != "cpu" and group._get_backend(tensor.device).name() == "gloo"


def broadcast(tensor: Tensor, *, among: WorkerGroup, source: int = 0) -> None:
    """Overwrite `tensor` on every rank with that of rank `source`."""
    if among.group is not None:
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous, group=among.group, group_src=source)
        tensor.detach().copy_(contiguous)


def scatter(tensor: Tensor, *, among: WorkerGroup, lengths: Sequence[int], source: int = 0) -> Tensor:
    """Return this rank's rows, along dim 0, of rank `source`'s tensor. The others pass a tensor without rows."""
    if among.group is None:
        return tensor
    longest = max(lengths)
    row = tensor.new_empty((longest, *tensor.shape[1:]))
    pieces = None
    if among.rank == source:
        # Backends take equal pieces only, as in `all_gather`.
        pieces = [row.new_zeros(row.shape) for _ in lengths]
        for piece, part in zip(pieces, tensor.split(list(lengths)), strict=True):
            piece[: part.shape[0]] = part
    dist.scatter(row, pieces, group=among.group, group_src=source)
    return row[: lengths[among.rank]]


def flatten_by_kind(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """Yield a flat copy of the tensors of each dtype and device, and a function that copies it back into them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        yield flat, partial(_copy_back, flat, members)


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.reshape(tensor.shape))
