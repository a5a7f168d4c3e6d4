"""Small messages between ranks: bytes that the caller has encoded as typed data, never pickled."""

import torch
import torch.distributed as dist

from rankless.parallel.mesh import Mesh


def broadcast_bytes(data: bytes, *, mesh: Mesh, source: int = 0) -> bytes:
    """What rank `source` passed, on every rank; the others' `data` is not looked at."""
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
    """What every rank passed, in the order of ranks; lengths may differ."""
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
    everyone = torch.empty(mesh.size * longest, dtype=torch.uint8, device=mesh.device)
    dist.all_gather_single(everyone, padded, group=mesh.group)
    rows = everyone.reshape(mesh.size, longest).cpu()
    return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]


def barrier(mesh: Mesh) -> None:
    """Return once every rank has come here."""
    all_gather_bytes(b"", mesh=mesh)
