"""The mirrored view: run the job eagerly once per device, on that device's element of each list argument.

Note [one job, many elements]: together the elements are the whole batch. A loss per sample is minimized as the mean
over all samples of all elements, also if elements differ in size. A scalar loss is minimized as the mean over the
elements.

On one worker the elements run one after the other, which is the same training. Each starts from the buffers before the
call, and the first element's buffers are kept. Each draws its random numbers from a seed of its own, and torch's
generator provides the common part of these seeds.

On several workers DistributedDataParallel reduces the gradients. Buffers are broadcast after each call, not before the
next one as DistributedDataParallel does, so that a checkpoint between calls holds one model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.mesh_collectives import all_reduce, broadcast, flatten_by_kind
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.compiler.capture.capture import extract_loss
from rankless.compiler.capture.global_modes import clear_autocast_cache, disable_autocast
from rankless.compiler.capture.result_structure import map_result
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.call_agreement import CallSync
from rankless.jobs.job_definition import CallResult, JobDefinition, detach_leaf
from rankless.jobs.model_sync_between_ranks import require_usable_models
from rankless.torch_versions import find_parameter


@dataclass(frozen=True)
class LocalArgument:
    """The result of `rankless.local`: this worker's element of an argument."""

    value: Any


pytree.register_pytree_node(
    LocalArgument,
    lambda item: ([item.value], None),
    lambda values, _context: LocalArgument(next(iter(values))),
    serialized_type_name="rankless.Local",
)


class MirroredView:
    """Runs one job in the mirrored view."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._sync = CallSync(job, world)
        self._parallel: nn.Module | None = None
        require_usable_models(job, world)
        if job.accumulates:
            raise ConfigError(
                expected="accumulate= on a job in the consistent view",
                found=f"job {job.name!r} in the mirrored view",
                fix='omit accumulate=, or view="mirrored"',
                where=job.line,
            )

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the list of all devices' results. A train job also sets its parameters' gradients."""
        args, kwargs = arguments.unflatten(arguments.tensors)
        elements = count_elements(self._job, args, kwargs, self._world.mesh.size)
        self._sync.check(
            f"call {self._sync.calls + 1} of job {self._job.name!r}, in the mirrored view, on {elements} devices"
        )
        self._world.owner.begin_call()
        parameters = self._job.parameters() if self._job.trains else []
        for parameter in parameters:
            parameter.grad = None
        seed = int(torch.randint(2**62, (), device="cpu").item())
        alone = self._world.mesh.size == 1
        results = (
            self._run_all_elements(args, kwargs, elements, seed) if alone else self._run_own_element(args, kwargs, seed)
        )
        self._world.owner.begin_call()  # the job may have changed parameters of which this worker has a shard
        loss = compute_mean_loss(results) if self._job.trains else None
        return CallResult(results, loss=loss, parameters=parameters)

    def _run_all_elements(self, args: Any, kwargs: Any, elements: int, seed: int) -> list[Any]:
        """Run every element in turn. Each backward follows its forward, because it may need the buffers."""
        before = [buffer.clone() for buffer in self._list_buffers()]
        results: list[Any] = []
        first_buffers: list[Tensor] = []
        for index in range(elements):
            result = self._compute(self._job.function, args, kwargs, index, seed)
            if self._job.trains:
                loss = get_loss(result)
                # Weight all elements as if they had as many samples as the first; corrected below if not.
                first = results[0] if results else result
                self._backward(loss.sum() / (get_loss(first).numel() * elements))
            results.append(map_result(detach_leaf, result))
            if elements > 1:
                first_buffers = first_buffers or [buffer.clone() for buffer in self._list_buffers()]
                self._restore(before if index < elements - 1 else first_buffers)
        if self._job.trains:
            sizes = [get_loss(result).numel() for result in results]
            if any(size != sizes[0] for size in sizes):
                for parameter in self._job.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(sizes[0] * elements / sum(sizes))
        return results

    def _run_own_element(self, args: Any, kwargs: Any, seed: int) -> list[Any]:
        """Run this worker's element and return the results of all."""
        mesh = self._world.mesh
        function: Callable[..., Any] = self._job.function
        if self._job.trains:
            self._parallel = self._parallel or wrap_in_ddp(self._job, mesh.group)
            function = self._parallel
        result = self._compute(function, args, kwargs, mesh.rank, seed)
        detached = map_result(detach_leaf, result)
        if self._job.trains:
            loss = get_loss(result)
            scaled_loss = loss
            if loss.dim():
                count = all_reduce(
                    torch.tensor(float(loss.numel()), dtype=torch.float64, device=mesh.device), among=mesh
                )
                # DistributedDataParallel averages the gradients over devices.
                scaled_loss = loss.sum() * (mesh.size / count.item())
            self._backward(scaled_loss)
        self._broadcast_buffers()
        if self._job.trains:
            mesh.check_sync_point_again()
        gathered = all_gather_bytes(self._encode(detached), mesh=mesh)
        return [
            pytree.tree_map_only(Tensor, lambda item: item.to(mesh.device), decode_value(data)) for data in gathered
        ]

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any, index: int, seed: int) -> Any:
        """Return the result of one element."""
        own_args, own_kwargs = select_elements(args, index), select_elements(kwargs, index)
        devices = [self._world.mesh.device] if self._world.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices), clear_autocast_cache(), torch.set_grad_enabled(self._job.trains):
            torch.manual_seed((seed + index) % 2**63)
            result = function(*own_args, **dict(own_kwargs))
        if self._job.trains:
            extract_loss(result, self._job.name)  # raises unless the loss is a tensor with gradient
        return result

    def _encode(self, result: Any) -> bytes:
        try:
            return encode_value(result)
        except TypeError as error:
            raise ConfigError(
                expected=f"tensors, numbers, texts or containers of them as the result of job {self._job.name!r}",
                found=str(error),
                fix="return plain data: the mirrored view sends results to all devices",
                where=self._job.line,
            ) from error

    def _backward(self, loss: Tensor) -> None:
        with disable_autocast(loss.device.type):
            loss.backward()

    def _broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers."""
        for flat, restore in flatten_by_kind(self._list_buffers()):
            broadcast(flat, among=self._world.mesh)
            restore()

    def _list_buffers(self) -> list[Tensor]:
        return [buffer for module in self._job.modules.values() for buffer in module.buffers()]

    def _restore(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._list_buffers(), values, strict=True):
                buffer.copy_(value)


class JobModule(nn.Module):
    """A job as a module for DistributedDataParallel: its function is the forward, its models are submodules."""

    def __init__(self, job: JobDefinition) -> None:
        super().__init__()
        self.models = nn.ModuleDict(job.modules)
        self.function = job.function
        # DDP warns if `find_unused_parameters` finds none. This parameter is always unused, so it never warns.
        self.unused = nn.Parameter(torch.zeros(1, device=job.device(torch.device("cpu"))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the job's function returns."""
        return self.function(*args, **kwargs)


def wrap_in_ddp(job: JobDefinition, group: Any) -> nn.Module:
    """Wrap the job in DistributedDataParallel. Each call may use other parameters, because a job is any code."""
    buffers: dict[str, Any] = {find_parameter(DistributedDataParallel, "forward_sync_buffers"): False}
    return DistributedDataParallel(JobModule(job), process_group=group, find_unused_parameters=True, **buffers)


def count_elements(job: JobDefinition, args: Any, kwargs: Any, size: int) -> int:
    """Return the number of devices that the lists of a call are for. Raises `ConfigError` if lists do not fit."""
    lengths = [len(value) for value in [*args, *kwargs.values()] if isinstance(value, list)]
    wrong = [length for length in lengths if length != (size if size > 1 else lengths[0]) or not length]
    if wrong:
        expected = f"length {size}, the number of devices" if size > 1 else "equal length"
        raise ConfigError(
            expected=f"lists of {expected} in job {job.name!r}: one element per device",
            found=f"a list of length {wrong[0]}",
            fix="pass rankless.world_size() elements, or rankless.local(x) for this device's own element",
            where=job.line,
        )
    if any(isinstance(value, LocalArgument) for value in [*args, *kwargs.values()]) or not lengths:
        return size
    return lengths[0]


def select_elements(values: Any, index: int) -> Any:
    """Return a device's element of each list; all other values are shared by the devices."""
    if isinstance(values, dict):
        return {name: select_element(value, index) for name, value in values.items()}
    return tuple(select_element(value, index) for value in values)


def select_element(value: Any, index: int) -> Any:
    """Return a device's element of one argument."""
    if isinstance(value, LocalArgument):
        return value.value
    return value[index] if isinstance(value, list) else value


def get_loss(result: Any) -> Tensor:
    """Return the loss in a train job's result: one number or one per sample."""
    found: Any = result
    if isinstance(result, dict):
        found = result["loss"]
    elif isinstance(result, tuple | list):
        found = result[0]
    assert isinstance(found, Tensor)
    return found


def compute_mean_loss(results: Sequence[Any]) -> Tensor:
    """Return the mean of all samples' losses, or of all devices' scalar losses."""
    return torch.cat([get_loss(result).reshape(-1) for result in results]).mean()
