"""What each rank writes into its file: whole tensors, its pieces of divided ones, or what all ranks gather for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rankless.checkpoint.manifest import TensorPiece
from rankless.ownership.partitioned_tensor import Partition, find_partition
from rankless.ownership.replica import Replica
from rankless.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class FileShare:
    """What one rank writes.

    Attributes:
        tensors: Tensors that this rank has, by their names in the file, not copied. A piece has a name of its own.
        pieces: Those of `tensors` that are pieces.
        gathered: Divided tensors that are written whole, by name, in an order that is equal on all ranks.
        writers: The ranks other than 0 that write a file.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, TensorPiece] = field(default_factory=dict)
    gathered: dict[str, Tensor] = field(default_factory=dict)
    writers: list[int] = field(default_factory=list)


def share_whole(tensors: Mapping[str, Tensor], *, rank: int) -> FileShare:
    """Return the share of a rank if rank 0 writes everything.

    Args:
        tensors: All tensors by name, of which some may be divided.
        rank: The rank.
    """
    gathered = {name: tensor for name, tensor in tensors.items() if find_partition(tensor) is not None}
    others = {name: tensor for name, tensor in tensors.items() if name not in gathered}
    return FileShare(tensors=others if rank == 0 else {}, gathered=gathered)


def share_by_owner(tensors: Mapping[str, Tensor], mesh: Mesh) -> FileShare:
    """Return this rank's share if each writes its pieces, and about as many bytes as the others.

    The first of the ranks that hold the same piece writes it.

    Args:
        tensors: All tensors by name, of which some may be divided.
        mesh: All ranks, which hold tensors of the same names and shapes.
    """
    rank, ranks = mesh.rank, mesh.size
    loads = [0] * ranks
    has_pieces = [False] * ranks
    own: dict[str, Tensor] = {}
    pieces: dict[str, TensorPiece] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        partition = find_partition(tensor)
        if partition is None:
            whole[name] = tensor
            continue
        replica = Replica(partition.piece, divided_along=partition.group)
        for number in sorted(set(replica.find_first_ranks(mesh))):
            place = mesh.find_rank_along(partition.group, number)
            ranges = describe_pieces(name, partition, place)
            loads[number] += partition.layout.piece_size(place) * tensor.element_size()
            has_pieces[number] |= bool(ranges)
            if number == rank and ranges:
                parts = partition.get_current_piece().chunk(len(ranges), partition.layout.placement.dim)
                own.update(zip((piece.name for piece in ranges), parts, strict=True))
                pieces.update({piece.name: piece for piece in ranges})
    shares = assign_tensors(whole, loads)
    own.update({name: whole[name] for name in shares[rank]})
    writers = [number for number in range(1, ranks) if shares[number] or has_pieces[number]]
    return FileShare(tensors=own, pieces=pieces, writers=writers)


def describe_pieces(name: str, partition: Partition, place: int) -> list[TensorPiece]:
    """Return which ranges of rows the rank at a place along the axis has that divides a tensor; none for no rows."""
    layout = partition.layout
    return [
        TensorPiece(name, layout.shape, layout.placement.dim, start, stop)
        for start, stop in layout.list_ranges(place)
        if start < stop
    ]


def assign_tensors(tensors: Mapping[str, Tensor], loads: list[int]) -> list[list[str]]:
    """Return the names of the tensors that each rank writes: about as many bytes each, equal on every rank.

    Args:
        tensors: The tensors by name.
        loads: The bytes that each rank writes besides, to which the tensors' are added.
    """
    shares: list[list[str]] = [[] for _ in loads]
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        # An empty tensor has an entry in the file's header too.
        loads[rank] += max(1, tensor.nbytes)
    return shares
