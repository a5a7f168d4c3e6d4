"""Small messages between the ranks of a mesh: bytes that the caller encodes as typed data, never as pickles."""

import torch
import torch.distributed as dist

from rankless.parallel.mesh import Mesh
from rankless.torch_versions import find_function


def broadcast_bytes(data: bytes, *, mesh: Mesh, source: int = 0) -> bytes:
    """Return the `data` of rank `source` on every rank, and ignore that of the others."""
    if mesh.group is None:
        return data
    size = torch.tensor([len(data)], dtype=torch.int64, device=mesh.device)
    dist.broadcast(size, group=mesh.group, group_src=source)
    received = torch.empty(int(size.item()), dtype=torch.uint8, device=mesh.device)
    if mesh.rank == source and data:
        received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if received.numel():
        dist.broadcast(received, group=mesh.group, group_src=source)
    return received.cpu().numpy().tobytes()


def all_gather_bytes(data: bytes, *, mesh: Mesh) -> list[bytes]:
    """Return the `data` of all ranks, in the order of ranks. Lengths may differ."""
    if mesh.group is None:
        return [data]
    sizes = torch.zeros(mesh.size, dtype=torch.int64, device=mesh.device)
    sizes[mesh.rank] = len(data)
    dist.all_reduce(sizes, group=mesh.group)
    lengths = [int(size) for size in sizes.tolist()]
    longest = max(1, *lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=mesh.device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(mesh.device)
    gathered = torch.empty(mesh.size * longest, dtype=torch.uint8, device=mesh.device)
    find_function(dist, "all_gather_single")(gathered, padded, group=mesh.group)
    rows = gathered.reshape(mesh.size, longest).cpu()
    return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]


def barrier(mesh: Mesh) -> None:
    """Return when every rank has made this call."""
    all_gather_bytes(b"", mesh=mesh)
