"""The mirrored view: the job runs eagerly, once per device, on that device's element of each list it is given.

Note [one job, many elements]: together the elements are the whole batch. A loss per sample is minimised as the mean
over all samples of all elements, also of uneven ones; a loss of one number as the mean of the elements' numbers. On one
worker the elements run one after the other, which is the same training: each starts from the buffers that were there
before the call, the first one's are kept, and each draws its random numbers from a seed of its own, drawn for all of
them from torch's generator. On several workers DistributedDataParallel sums the gradients; the buffers are handed on
after each call, where it would do so before the next: what is saved in between must be one model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.tensor_collectives import all_reduce, broadcast, flatten_by_kind
from rankless.collectives.typed_values import decode_value, encode_value
from rankless.compiler.capture.autocast import clear_autocast_cache, disable_autocast
from rankless.compiler.capture.capture import extract_loss
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.arguments import Arguments
from rankless.jobs.definition import CallResult, JobDefinition, detach_leaf
from rankless.jobs.model_sync import check_models_equal, require_same_kind_of_device, sync_models


@dataclass(frozen=True)
class LocalElement:
    """What `rankless.local` makes: this worker's element of an argument, where the others have theirs."""

    value: Any


pytree.register_pytree_node(
    LocalElement,
    lambda item: ([item.value], None),
    lambda values, _context: LocalElement(next(iter(values))),
    serialized_type_name="rankless.Local",
)


class MirroredView:
    """Runs one job in the mirrored view."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._calls = 0
        self._parallel: nn.Module | None = None
        require_same_kind_of_device(job, world)
        if job.accumulates:
            raise ConfigError(
                expected="accumulate= on a job in the consistent view",
                found=f"job {job.name!r} in the mirrored view",
                fix='leave accumulate= away, or view="mirrored"',
                where=job.line,
            )

    def run(self, arguments: Arguments) -> CallResult:
        """The list of all devices' results; a train job's gradients are made."""
        args, kwargs = arguments.unflatten(arguments.tensors)
        elements = count_elements(self._job, args, kwargs, self._world.mesh.size)
        self._sync_call(elements)
        for parameter in self._job.parameters() if self._job.trains else ():
            parameter.grad = None
        seed = int(torch.randint(2**62, ()).item())
        alone = self._world.mesh.size == 1
        results = (
            self._run_all_elements(args, kwargs, elements, seed) if alone else self._run_own_element(args, kwargs, seed)
        )
        return CallResult(results, loss=compute_mean_loss(results) if self._job.trains else None)

    def _sync_call(self, elements: int) -> None:
        """Make sure that all ranks make this call; at the first, that their models are alike."""
        self._calls += 1
        mesh = self._world.mesh
        mesh.check_sync_point(
            f"call {self._calls} of job {self._job.name!r}, in the mirrored view, on {elements} devices"
        )
        if self._calls == 1:
            sync_models(self._job, self._world, when="at the first call")
        every = self._job.check_synchronized_every
        if every is not None and self._calls % every == 0:
            check_models_equal(self._job, self._world, call=self._calls)

    def _run_all_elements(self, args: Any, kwargs: Any, elements: int, seed: int) -> list[Any]:
        """Every element, one after the other, each with its backward: buffers may be what a backward needs."""
        before = [buffer.clone() for buffer in self._buffers()]
        results: list[Any] = []
        kept: list[Tensor] = []
        for place in range(elements):
            result = self._compute(self._job.function, args, kwargs, place, seed)
            if self._job.trains:
                loss = loss_of(result)
                # As if all elements had as many samples as the first; mended below where they have not.
                first = results[0] if results else result
                self._backward(loss.sum() / (loss_of(first).numel() * elements))
            results.append(pytree.tree_map(detach_leaf, result))
            if elements > 1:
                kept = kept or [buffer.clone() for buffer in self._buffers()]
                self._restore(before if place < elements - 1 else kept)
        if self._job.trains:
            sizes = [loss_of(result).numel() for result in results]
            if any(size != sizes[0] for size in sizes):
                for parameter in self._job.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(sizes[0] * elements / sum(sizes))
        return results

    def _run_own_element(self, args: Any, kwargs: Any, seed: int) -> list[Any]:
        """This worker's element, and the results of all."""
        mesh = self._world.mesh
        function: Callable[..., Any] = self._job.function
        if self._job.trains:
            self._parallel = self._parallel or wrap_in_ddp(self._job, mesh.group)
            function = self._parallel
        result = self._compute(function, args, kwargs, mesh.rank, seed)
        mine = pytree.tree_map(detach_leaf, result)
        if self._job.trains:
            loss = loss_of(result)
            share = loss
            if loss.dim():
                count = all_reduce(
                    torch.tensor(float(loss.numel()), dtype=torch.float64, device=mesh.device), mesh=mesh
                )
                # DistributedDataParallel makes the mean of the devices' gradients.
                share = loss.sum() * (mesh.size / count.item())
            self._backward(share)
        self._broadcast_buffers()
        told = all_gather_bytes(self._encode(mine), mesh=mesh)
        return [pytree.tree_map_only(Tensor, lambda item: item.to(mesh.device), decode_value(data)) for data in told]

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any, place: int, seed: int) -> Any:
        """The result of one element."""
        own_args, own_kwargs = select_elements(args, place), select_elements(kwargs, place)
        devices = [self._world.mesh.device] if self._world.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices), clear_autocast_cache(), torch.set_grad_enabled(self._job.trains):
            torch.manual_seed((seed + place) % 2**63)
            result = function(*own_args, **dict(own_kwargs))
        if self._job.trains:
            extract_loss(result, self._job.name)  # a loss of the right kind, or an error
        return result

    def _encode(self, result: Any) -> bytes:
        try:
            return encode_value(result)
        except TypeError as error:
            raise ConfigError(
                expected=f"tensors, numbers, text or containers of them as the result of job {self._job.name!r}",
                found=str(error),
                fix="return plain data: in the mirrored view results travel to all devices",
                where=self._job.line,
            ) from error

    def _backward(self, loss: Tensor) -> None:
        with disable_autocast(loss.device.type):
            loss.backward()

    def _broadcast_buffers(self) -> None:
        """Let every rank have the first one's buffers, as before the call."""
        for flat, restore in flatten_by_kind(self._buffers()):
            broadcast(flat, mesh=self._world.mesh)
            restore()

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self._job.modules.values() for buffer in module.buffers()]

    def _restore(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), values, strict=True):
                buffer.copy_(value)


class JobModule(nn.Module):
    """A job as a module, as DistributedDataParallel wants it: its function is the forward, its models are parts."""

    def __init__(self, job: JobDefinition) -> None:
        super().__init__()
        self.models = nn.ModuleDict(job.modules)
        self.function = job.function
        # PyTorch warns at a step in which no parameter is left over; jobs that leave some are what this one stands for.
        self.unused = nn.Parameter(torch.zeros(1, device=job.device(torch.device("cpu"))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the job's function returns."""
        return self.function(*args, **kwargs)


def wrap_in_ddp(job: JobDefinition, group: Any) -> nn.Module:
    """The job under DistributedDataParallel. Calls may use other parameters each time: a job is any Python."""
    return DistributedDataParallel(
        JobModule(job), process_group=group, find_unused_parameters=True, forward_sync_buffers=False
    )


def count_elements(job: JobDefinition, args: Any, kwargs: Any, size: int) -> int:
    """How many devices the lists of a call are for. Raises ConfigError for lists that do not fit."""
    lengths = [len(value) for value in [*args, *kwargs.values()] if isinstance(value, list)]
    wrong = [length for length in lengths if length != (size if size > 1 else lengths[0]) or not length]
    if wrong:
        wanted = f"{size}, the devices of this job" if size > 1 else "one length"
        raise ConfigError(
            expected=f"lists of {wanted}, in job {job.name!r}: one element per device",
            found=f"a list of {wrong[0]}",
            fix="pass as many elements as rankless.world_size() says, or rankless.local(x) for this device's own",
            where=job.line,
        )
    if any(isinstance(value, LocalElement) for value in [*args, *kwargs.values()]) or not lengths:
        return size
    return lengths[0]


def select_elements(values: Any, place: int) -> Any:
    """A device's own: its element of each list at the top; what is no list is everybody's."""
    if isinstance(values, dict):
        return {name: select_element(value, place) for name, value in values.items()}
    return tuple(select_element(value, place) for value in values)


def select_element(value: Any, place: int) -> Any:
    """A device's element of one argument."""
    if isinstance(value, LocalElement):
        return value.value
    return value[place] if isinstance(value, list) else value


def loss_of(result: Any) -> Tensor:
    """The loss in a train job's result, one number or one per sample."""
    found: Any = result
    if isinstance(result, dict):
        found = result["loss"]
    elif isinstance(result, tuple | list):
        found = result[0]
    assert isinstance(found, Tensor)
    return found


def compute_mean_loss(results: Sequence[Any]) -> Tensor:
    """The mean of all samples' losses, or of all devices' where a loss is one number."""
    return torch.cat([loss_of(result).reshape(-1) for result in results]).mean()
