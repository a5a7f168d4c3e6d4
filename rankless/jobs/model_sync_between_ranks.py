"""Check that a job's models are the same on every rank, or synchronize them from rank 0."""

import hashlib
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.mesh_collectives import broadcast
from rankless.collectives.value_encoding import view_bytes
from rankless.compiler.capture.side_effects import require_initialized
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.ir.sparse_tensor_parts import list_dense_parts
from rankless.context.changes_outside_jobs import list_state_entries
from rankless.context.world import World
from rankless.errors import ConfigError, RanksDiverged
from rankless.jobs.job_definition import JobDefinition
from rankless.records.encoding import encode_msgpack

SHOWN = 3


def require_usable_models(job: JobDefinition, world: World) -> None:
    """Raise `ConfigError` for a model on the CPU in a job on GPUs, or the reverse, and for one that PyTorch divides."""
    require_plain_tensors(job)
    device = job.device(world.mesh.device)
    if device.type != world.mesh.device.type:
        raise ConfigError(
            expected=f"the models of job {job.name!r} on this worker's device, {world.mesh.device}",
            found=f"on {device}",
            fix=f"model.to({world.mesh.device.type!r}) before you create the optimizer, or --devices {device.type}",
        )


def require_plain_tensors(job: JobDefinition) -> None:
    """Raise `ConfigError` for a model that `fully_shard` or `parallelize_module` has divided."""
    for name, tensor in sorted(named_tensors(job.modules).items()):
        if isinstance(tensor, DTensor):
            raise ConfigError(
                expected=f"models of plain tensors in job {job.name!r}, which it divides itself",
                found=f"{name}, a DTensor, as fully_shard and parallelize_module of PyTorch make them",
                fix="remove that call, and pass zero='parameters' to rankless.job, or --mesh tensor=2 to rankless run",
                where=job.line,
            )


def sync_models(job: JobDefinition, world: World, *, when: str) -> None:
    """Compare the models of all ranks. If they differ, broadcast rank 0's and warn."""
    require_initialized(job.modules, job.line)
    sync_tensors(sorted(named_tensors(job.modules).items()), job, world, when=when)


def sync_tensors(tensors: Sequence[tuple[str, Tensor]], job: JobDefinition, world: World, *, when: str) -> None:
    """Compare some tensors of a job's models on the ranks that must hold the same. If they differ, share them and warn.

    The first rank that must hold a value has it right: rank 0 for a whole one.
    """
    different = find_differing_tensors(tensors, job, world)
    if not different:
        return
    for _, tensor in tensors:
        replica = world.owner.find_replica(tensor)
        for group in replica.list_groups(world.mesh):
            with torch.no_grad():
                for part in list_dense_parts(replica.local):
                    broadcast(part, among=group)
    world.notify(
        f"{job.line}: the models of job {job.name!r} differed between ranks {when} ({list_differences(different)}); "
        "all ranks now have rank 0's"
    )


def check_models_equal(job: JobDefinition, world: World, *, call: int) -> None:
    """Raise `RanksDiverged` on every rank if a parameter, a buffer or optimizer state differs between ranks."""
    tensors = [*sorted(named_tensors(job.modules).items()), *list_state_tensors(job)]
    different = find_differing_tensors(tensors, job, world)
    if different:
        raise RanksDiverged(
            expected=f"the same parameters and buffers on every rank before call {call} of job {job.name!r}, "
            "and the same optimizer state",
            found=list_differences(different),
            fix="find the code that changes a model outside jobs on some ranks only, as through .data or NumPy",
            where=job.line,
        )


def find_differing_tensors(
    tensors: Sequence[tuple[str, Tensor]], job: JobDefinition, world: World
) -> dict[str, list[int]]:
    """Return the tensors that differ from those of the first rank that must hold the same, with the ranks. Collective.

    The owner says which ranks must: all for a whole tensor, and nobody else for a shard if one axis divides all ranks.
    """
    names, own_digests, first_ranks = [], [], {}
    for name, tensor in tensors:
        replica = world.owner.find_replica(tensor)
        if not replica.is_shared(world.mesh):
            continue
        parts = list_dense_parts(replica.local.detach())
        sizes = "".join(f" {list(part.shape)}" for part in parts if part.layout != replica.local.layout)
        names.append(f"{name} {tensor.dtype} {list(tensor.shape)}{sizes}")
        own = hashlib.blake2b(digest_size=8)
        for part in parts:
            own.update(view_bytes(part.cpu()).numpy().data)
        own_digests.append(own.digest())
        first_ranks[names[-1]] = replica.find_first_ranks(world.mesh)
    whole = hashlib.blake2b(encode_msgpack([names, own_digests]), digest_size=16).digest()
    if len(set(all_gather_bytes(whole, mesh=world.mesh))) == 1:
        return {}
    gathered = all_gather_bytes(encode_msgpack([names, own_digests]), mesh=world.mesh)
    states = [msgspec.msgpack.decode(data, type=tuple[list[str], list[bytes]]) for data in gathered]
    digests = [dict(zip(*state, strict=True)) for state in states]
    different: dict[str, list[int]] = {}
    for rank, (their_names, their_digests) in enumerate(states):
        if their_names != states[0][0]:
            raise RanksDiverged(
                expected=f"the same parameters and buffers in the models of job {job.name!r} on every rank",
                found=f"rank {rank} has others than rank 0: {find_first_mismatch(states[0][0], their_names)}",
                fix="build the same models on every rank",
                where=job.line,
            )
        for name, digest in zip(their_names, their_digests, strict=True):
            if digests[first_ranks[name][rank]][name] != digest:
                different.setdefault(name.rpartition(" torch.")[0], []).append(rank)
    return different


def list_state_tensors(job: JobDefinition) -> list[tuple[str, Tensor]]:
    """Return the tensors of the optimizers' state, with names such as "exp_avg of model.head.weight"."""
    found = []
    for optimizer in job.optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for entry in list_state_entries(optimizer):
            if isinstance(entry.value, Tensor):
                owner = f" of {job.parameter_name(parameters[entry.parameter])}" if entry.parameter >= 0 else ""
                found.append((f"{entry.key}{owner}", entry.value))
    return found


def find_first_mismatch(ours: list[str], theirs: list[str]) -> str:
    """Return the first tensor that only one of two ranks has."""
    only = [name for name in theirs if name not in ours] or [name for name in ours if name not in theirs]
    return only[0] if only else "in another order"


def list_differences(different: dict[str, list[int]]) -> str:
    """Describe which tensors differ, in a few words."""
    shown = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in list(different.items())[:SHOWN]]
    more = len(different) - len(shown)
    return f"{'; '.join(shown)}{f'; and {more} more' if more > 0 else ''} not rank 0's"
