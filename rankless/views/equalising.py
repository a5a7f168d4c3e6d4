"""Before a job's first call: its models are where they should be, and the same on every rank."""

import hashlib

import torch

from rankless.collectives.messages import all_gather_bytes
from rankless.collectives.tensors import broadcast
from rankless.errors import PlanError
from rankless.program.clean import named_tensors
from rankless.program.effects import require_initialised
from rankless.views.definition import JobDefinition
from rankless.views.world import World


def require_same_kind_of_device(job: JobDefinition, world: World) -> None:
    """Refuse a model on the CPU in a job of GPUs, or the reverse: its values could not be moved."""
    device = job.device(world.mesh.device)
    if device.type != world.mesh.device.type:
        raise PlanError(
            expected=f"the models of job {job.name!r} on this worker's device, {world.mesh.device}",
            found=f"on {device}",
            fix=f"model.to({world.mesh.device.type!r}) before the optimizer is made, or --devices {device.type}",
        )


def equalise(job: JobDefinition, world: World) -> None:
    """Compare parameters and buffers of all ranks; where they differ rank 0's win, and that is said."""
    require_initialised(job.modules)
    tensors = named_tensors(job.modules)
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if len(set(all_gather_bytes(digest.digest(), mesh=world.mesh))) == 1:
        return
    for _, tensor in sorted(tensors.items()):
        with torch.no_grad():
            broadcast(tensor, mesh=world.mesh)
    world.say(f"the models of job {job.name!r} differed between ranks at the first call; all now have rank 0's")
