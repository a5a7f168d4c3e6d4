"""The training code of torch 2.13 that waits for a `Work` or takes its future. See `work_callers`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Call = Callable[[], object]
Prepare = Callable[[Any], Call]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def _backward(model: torch.nn.Module) -> None:
    model(torch.randn(4, 6)).square().mean().backward()


def _wrap(group: Any, module: torch.nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(make_model() if module is None else module, process_group=group, **options)


def _ddp(**options: Any) -> Prepare:
    """Make two backward passes: the reducer divides its buckets anew after the first. Then one that fails."""

    def prepare(group: Any) -> Call:
        model = _wrap(group, broadcast_buffers=False, **options)
        _backward(model)
        _backward(model)
        return lambda: _backward(model)

    return prepare


def _ddp_forward(group: Any) -> Call:
    """The buffers of the first rank go to the others before each forward pass."""
    model = _wrap(group)
    _backward(model)
    return lambda: model(torch.randn(4, 6))


def _ddp_first_backward(group: Any) -> Call:
    model = _wrap(group, broadcast_buffers=False)
    return lambda: _backward(model)


def _ddp_no_sync(group: Any) -> Call:
    model = _wrap(group, broadcast_buffers=False)

    def call() -> None:
        with model.no_sync():
            _backward(model)
        _backward(model)

    return call


def _ddp_join(group: Any) -> Call:
    model = _wrap(group)
    _backward(model)

    def call() -> None:
        with model.join():
            _backward(model)

    return call


def _ddp_hook(make_state: Callable[[Any], Any], hook: Any) -> Prepare:
    def prepare(group: Any) -> Call:
        model = _wrap(group, broadcast_buffers=False)
        model.register_comm_hook(make_state(group), hook)
        for _ in range(3):
            _backward(model)
        return lambda: _backward(model)

    return prepare


def _ddp_builtin_hook(group: Any) -> Call:
    model = _wrap(group, broadcast_buffers=False)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _backward(model)
    return lambda: _backward(model)


def _power_sgd(group: Any) -> Any:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)


def _ddp_optimizer_in_backward(group: Any) -> Call:
    model = _wrap(group, broadcast_buffers=False)
    model._register_fused_optim(torch.optim.SGD, 0.1)
    _backward(model)
    return lambda: _backward(model)


DDP: dict[str, Prepare] = {
    "DDP": _ddp(),
    "DDP constructor": lambda group: lambda: _wrap(group),
    "DDP first backward": _ddp_first_backward,
    "DDP buffers": _ddp_forward,
    "DDP static_graph": _ddp(static_graph=True),
    "DDP find_unused_parameters": _ddp(find_unused_parameters=True),
    "DDP gradient_as_bucket_view": _ddp(gradient_as_bucket_view=True),
    "DDP small buckets": _ddp(bucket_cap_mb=0.0001),
    "DDP no_sync": _ddp_no_sync,
    "DDP join": _ddp_join,
    "DDP builtin hook": _ddp_builtin_hook,
    "DDP allreduce_hook": _ddp_hook(lambda group: group, default_hooks.allreduce_hook),
    "DDP fp16_compress_hook": _ddp_hook(lambda group: group, default_hooks.fp16_compress_hook),
    "DDP powerSGD_hook": _ddp_hook(_power_sgd, powerSGD_hook.powerSGD_hook),
    "DDP fp16 of powerSGD": _ddp_hook(_power_sgd, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "DDP post_localSGD_hook": _ddp_hook(
        lambda group: post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=100),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "DDP quantization_hook": _ddp_hook(lambda group: group, quantization_hooks.quantization_pertensor_hook),
    "DDP optimizer in backward": _ddp_optimizer_in_backward,
}
"""DistributedDataParallel, whose reducer takes futures in C++."""


def _mesh(group: Any) -> DeviceMesh:
    # DTensor caches placements with their mesh, and takes equal meshes of other groups, also closed ones, for this one.
    _clear_sharding_prop_cache()
    return DeviceMesh.from_group(group, "cpu")


def _fsdp(group: Any) -> Call:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    fully_shard(model[0], mesh=_mesh(group))
    fully_shard(model, mesh=_mesh(group))
    _backward(model)
    return lambda: _backward(model)


def _fsdp_backward(group: Any) -> Call:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    fully_shard(model[0], mesh=_mesh(group))
    fully_shard(model, mesh=_mesh(group))
    _backward(model)
    loss = model(torch.randn(4, 6)).square().mean()
    return lambda: loss.backward()


def _redistribute(source: Any, target: Any) -> Prepare:
    def prepare(group: Any) -> Call:
        tensor = distribute_tensor(torch.ones(8, 8), _mesh(group), [Replicate()])
        tensor = DTensor.from_local(tensor.to_local(), _mesh(group), [source], run_check=False)
        return lambda: tensor.redistribute(placements=[target]).to_local().sum().item()

    return prepare


def _full_tensor(group: Any) -> Call:
    tensor = distribute_tensor(torch.ones(8, 8), _mesh(group), [Shard(0)])
    return lambda: tensor.full_tensor().sum().item()


def _tensor_parallel(group: Any) -> Call:
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Linear(12, 3))
    parallelize_module(model, _mesh(group), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    _backward(model)
    return lambda: _backward(model)


def _zero_optimizer(group: Any) -> Call:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    _backward(model)
    optimizer.step()
    return lambda: optimizer.step()


def _zero_optimizer_state(group: Any) -> Call:
    model = torch.nn.Linear(6, 8)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    _backward(model)
    optimizer.step()
    return lambda: optimizer.consolidate_state_dict(to=dist.get_global_rank(group, 0))


def _model_averager(group: Any) -> Call:
    model = torch.nn.Linear(6, 8)
    averager = PeriodicModelAverager(period=1, process_group=group)
    _backward(model)  # parameters without a gradient are not averaged
    averager.average_parameters(model.parameters())
    return lambda: averager.average_parameters(model.parameters())


def _clip(group: Any) -> Call:
    model = torch.nn.Linear(6, 8)
    fully_shard(model, mesh=_mesh(group))
    _backward(model)
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()  # type: ignore[attr-defined]


LIBRARIES: dict[str, Prepare] = {
    "FSDP2 forward": _fsdp,
    "FSDP2 backward": _fsdp_backward,
    "DTensor Shard to Replicate": _redistribute(Shard(0), Replicate()),
    "DTensor Partial to Replicate": _redistribute(Partial(), Replicate()),
    "DTensor Partial to Shard": _redistribute(Partial(), Shard(0)),
    "DTensor Shard to Shard": _redistribute(Shard(0), Shard(1)),
    "DTensor full_tensor": _full_tensor,
    "tensor parallel": _tensor_parallel,
    "ZeroRedundancyOptimizer": _zero_optimizer,
    "ZeroRedundancyOptimizer state": _zero_optimizer_state,
    "PeriodicModelAverager": _model_averager,
    "clip_grad_norm_ of FSDP2": _clip,
}
"""Other parts of `torch.distributed`."""
