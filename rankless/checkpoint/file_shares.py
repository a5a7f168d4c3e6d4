"""What each rank writes into its file: whole tensors, its pieces of divided ones, or what all ranks gather for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor

from rankless.checkpoint.manifest import RowRange, TensorPiece
from rankless.ownership.partitioned_tensor import Partition, find_partition, list_partitions
from rankless.ownership.piece_layout import select_ranges
from rankless.ownership.state_owner import Replica
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


@dataclass(frozen=True, kw_only=True)
class OwnPieces:
    """The pieces of divided tensors that one rank writes.

    Attributes:
        tensors: Their elements, by their names in the file, not copied.
        pieces: What they are pieces of, by name.
    """

    tensors: dict[str, Tensor]
    pieces: dict[str, TensorPiece]

    @property
    def size(self) -> int:
        """Their bytes; -1 if there are none."""
        return sum(part.nbytes for part in self.tensors.values()) if self.tensors else -1


def list_own_pieces(tensors: Mapping[str, Tensor], mesh: Mesh) -> OwnPieces:
    """Return the pieces that this rank writes: the first of the ranks that hold the same piece does.

    Args:
        tensors: All tensors by name, of which some may be divided.
        mesh: All ranks.
    """
    found: list[tuple[TensorPiece, Tensor]] = []
    for name, tensor in tensors.items():
        partitions = list_partitions(tensor)
        replica = Replica(tensor, tuple(partition.group for partition in partitions))
        is_copy = any(partition.is_copy for partition in partitions)
        if partitions and not is_copy and replica.find_first_ranks(mesh)[mesh.rank] == mesh.rank:
            found += split_piece(name, partitions)
    return OwnPieces(
        tensors={piece.name: part for piece, part in found}, pieces={piece.name: piece for piece, _ in found}
    )


def share_by_owner(tensors: Mapping[str, Tensor], own: OwnPieces, sizes: Sequence[int], rank: int) -> FileShare:
    """Return a rank's share if each writes its pieces, and about as many bytes as the others.

    Args:
        tensors: All tensors by name, of which some may be divided. All ranks hold tensors of the same names and shapes.
        own: The pieces of this rank.
        sizes: The bytes of each rank's pieces; -1 for a rank that has none.
        rank: The rank.
    """
    whole = {name: tensor for name, tensor in tensors.items() if find_partition(tensor) is None}
    shares = assign_tensors(whole, [max(0, size) for size in sizes])
    written = own.tensors | {name: whole[name] for name in shares[rank]}
    writers = [number for number in range(1, len(sizes)) if shares[number] or sizes[number] >= 0]
    return FileShare(tensors=written, pieces=own.pieces, writers=writers)


def split_piece(name: str, partitions: Sequence[Partition]) -> Iterator[tuple[TensorPiece, Tensor]]:
    """Yield the boxes of a tensor's elements that this rank has, and their elements; nothing for no rows.

    Args:
        name: The tensor's name.
        partitions: How one axis after the other divides it.
    """
    shape = partitions[0].layout.shape
    ranges: dict[int, list[tuple[int, int]]] = {}
    for partition in partitions:
        dim = partition.layout.placement.dim
        ranges[dim] = select_ranges(ranges.get(dim, [(0, shape[dim])]), partition.own_ranges)
    local = partitions[0].get_current_piece()
    dims = sorted(ranges)
    for chosen in product(*(ranges[dim] for dim in dims)):
        part = local
        for dim, (start, stop) in zip(dims, chosen, strict=True):
            before = sum(high - low for low, high in ranges[dim] if low < start)
            part = part.narrow(dim, before, stop - start)
        first, *others = [RowRange(dim, *rows) for dim, rows in zip(dims, chosen, strict=True)]
        piece = TensorPiece(name, shape, first.dim, first.start, first.stop, tuple(others))
        yield piece, part


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
