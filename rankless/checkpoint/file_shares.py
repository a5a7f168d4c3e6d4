"""What each rank writes into its file: whole tensors, its pieces of divided ones, or what all ranks gather for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rankless.checkpoint.manifest import TensorPiece
from rankless.ownership.partitioned_tensor import Partition, find_partition


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


def share_by_owner(tensors: Mapping[str, Tensor], *, rank: int, ranks: int) -> FileShare:
    """Return the share of a rank if each writes its pieces, and about as many bytes as the others.

    Args:
        tensors: All tensors by name, of which some may be divided.
        rank: The rank.
        ranks: The number of ranks, all of which hold tensors of the same names and shapes.
    """
    loads = [0] * ranks
    has_pieces = [False] * ranks
    own, pieces, whole = {}, {}, {}
    for name, tensor in tensors.items():
        partition = find_partition(tensor)
        if partition is None:
            whole[name] = tensor
            continue
        for number in range(ranks):
            piece = describe_piece(name, partition, number)
            loads[number] += partition.layout.piece_size(number) * tensor.element_size()
            has_pieces[number] |= piece.start < piece.stop
            if number == rank and piece.start < piece.stop:
                own[piece.name] = partition.get_current_piece()
                pieces[piece.name] = piece
    shares = assign_tensors(whole, loads)
    own.update({name: whole[name] for name in shares[rank]})
    writers = [number for number in range(1, ranks) if shares[number] or has_pieces[number]]
    return FileShare(tensors=own, pieces=pieces, writers=writers)


def describe_piece(name: str, partition: Partition, rank: int) -> TensorPiece:
    """Return which rows of a tensor a rank has."""
    placement = partition.layout.placement
    start = placement.start(rank)
    return TensorPiece(name, partition.layout.shape, placement.dim, start, start + placement.lengths[rank])


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
