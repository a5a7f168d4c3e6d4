"""The code of torch 2.13 that waits for a `Work`, or takes its future: the callers that a failed collective must reach.

Each entry prepares a call with collectives that succeed on all ranks, and returns the call, which fails if a rank of
the group does not take part. The C++ callers are DistributedDataParallel's reducer and its builtin hooks,
`_broadcast_coalesced`, and `wait_tensor`. The others are Python. Left out: rpc, and what needs an accelerator.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd_functions
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Call = Callable[[], object]
Prepare = Callable[[Any], Call]


def _ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count)


def _list(group: Any) -> list[torch.Tensor]:
    return [_ones() for _ in range(group.size())]


def _root(group: Any) -> int:
    """The rank of the run that is the first of the group."""
    return dist.get_global_rank(group, 0)


def _coalesce(group: Any, *, is_async: bool) -> None:
    with distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
        dist.all_reduce(_ones(), group=group)
        dist.all_reduce(_ones(3), group=group)
    if is_async:
        manager.wait()


def _exchange(group: Any) -> None:
    """Receive from the second rank of the group, which sends to the first."""
    if group.rank() == 1:
        dist.send(_ones(), group=group, group_dst=0)
    else:
        dist.recv(_ones(), group=group, group_src=1)


def _exchange_in_a_batch(group: Any) -> None:
    other = dist.get_global_rank(group, 1 if group.rank() != 1 else 0)
    operations = [dist.P2POp(dist.isend, _ones(), other, group), dist.P2POp(dist.irecv, _ones(), other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _send_objects(group: Any) -> None:
    if group.rank() == 1:
        dist.send_object_list([1], group=group, group_dst=0)
    else:
        dist.recv_object_list([None], group=group, group_src=1)


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(_ones(), group=group),
    "all_reduce, long": lambda group: dist.all_reduce(_ones(1_000_000), group=group),
    "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced([_ones(), _ones(3)], group=group),
    "broadcast": lambda group: dist.broadcast(_ones(), group=group, group_src=1),
    "reduce": lambda group: dist.reduce(_ones(), group=group, group_dst=0),
    "all_gather": lambda group: dist.all_gather(_list(group), _ones(), group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(_ones(8 * group.size()), _ones(), group=group),
    "all_gather_coalesced": lambda group: dist.all_gather_coalesced([_list(group)], [_ones()], group=group),
    "gather": lambda group: dist.gather(_ones(), _list(group) if group.rank() == 0 else None, group_dst=0, group=group),
    "scatter": lambda group: dist.scatter(
        _ones(), _list(group) if group.rank() == 1 else None, group_src=1, group=group
    ),
    "reduce_scatter": lambda group: dist.reduce_scatter(_ones(), _list(group), group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(_ones(), _ones(8 * group.size()), group=group),
    "all_to_all": lambda group: dist.all_to_all(_list(group), _list(group), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(
        _ones(8 * group.size()), _ones(8 * group.size()), group=group
    ),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "recv": _exchange,
    "batch_isend_irecv": _exchange_in_a_batch,
    "all_gather_object": lambda group: dist.all_gather_object([None] * group.size(), 1, group=group),
    "gather_object": lambda group: dist.gather_object(
        1, [None] * group.size() if group.rank() == 0 else None, group_dst=0, group=group
    ),
    "broadcast_object_list": lambda group: dist.broadcast_object_list([1], group_src=1, group=group),
    "scatter_object_list": lambda group: dist.scatter_object_list(
        [None], list(range(group.size())), group_src=1, group=group
    ),
    "recv_object_list": _send_objects,
    "coalescing manager": lambda group: _coalesce(group, is_async=False),
    "coalescing manager, async": lambda group: _coalesce(group, is_async=True),
    "_broadcast_coalesced": lambda group: dist._broadcast_coalesced(group, [_ones(), _ones(3)], 1024, 1),
    "nn.functional.all_reduce": lambda group: autograd_functions.all_reduce(_ones(), group=group),
    "nn.functional.all_gather": lambda group: autograd_functions.all_gather(_ones(), group=group),
    "nn.functional.all_to_all_single": lambda group: autograd_functions.all_to_all_single(
        _ones(8 * group.size()), _ones(8 * group.size()), group=group
    ),
    "functional all_reduce": lambda group: functional.all_reduce(_ones(), "sum", group).sum().item(),
    "functional wait_tensor": lambda group: functional.wait_tensor(functional.all_reduce(_ones(), "sum", group)),
    "functional broadcast": lambda group: functional.broadcast(_ones(), 1, group).sum().item(),
    "functional all_gather": lambda group: functional.all_gather_tensor(_ones(), 0, group).sum().item(),
    "functional reduce_scatter": lambda group: (
        functional.reduce_scatter_tensor(_ones(8 * group.size()), "sum", 0, group).sum().item()
    ),
    "functional all_to_all": lambda group: (
        functional.all_to_all_single(_ones(8 * group.size()), None, None, group).sum().item()
    ),
    "functional all_reduce_coalesced": lambda group: (
        functional.all_reduce_coalesced([_ones(), _ones(3)], "sum", group)[1].sum().item()
    ),
    "functional permute_tensor": lambda group: (
        functional.permute_tensor(_ones(), [*range(1, group.size()), 0], group).sum().item()
    ),
}
"""Calls of one line."""


def _start(group: Any) -> Any:
    return dist.all_reduce(_ones(), group=group, async_op=True)


def _wait_then(group: Any) -> object:
    return _start(group).get_future().then(lambda future: future.value()[0] + 1).wait()


def _wait_value(group: Any) -> object:
    future = _start(group).get_future()
    try:
        future.wait()
    except RuntimeError:
        return future.value()
    return None


def _wait_late(group: Any) -> object:
    """Take the future of a work that has failed before."""
    work = _start(group)
    try:
        work.wait()
    except RuntimeError:
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
        return work.get_future().wait()
    return None


def _drop(group: Any) -> object:
    """Drop a work, and learn at the next call that it has failed."""
    _start(group)
    _start(group).get_future()
    functional.all_reduce(_ones(), "sum", group)
    return dist.all_reduce(_ones(), group=group)


def _call_back(group: Any) -> object:
    """Read the outcome in a callback, which cannot raise to anybody."""
    found: list[Any] = []

    def callback(future: Any) -> None:
        try:
            found.append(future.value())
        except RuntimeError as error:
            found.append(error)

    future = _start(group).get_future()
    future.add_done_callback(callback)
    if isinstance(future.then(lambda done: done.done() and found[0]).wait(), RuntimeError):
        raise found[0]
    return None


FUTURES: dict[str, Callable[[Any], object]] = {
    "work.wait": lambda group: _start(group).wait(),
    "work.synchronize": lambda group: _start(group).synchronize(),
    "future.wait": lambda group: _start(group).get_future().wait(),
    "future.value": _wait_value,
    "future.then": _wait_then,
    "future.add_done_callback": _call_back,
    "future of a failed work": _wait_late,
    "collect_all": lambda group: torch.futures.wait_all([_start(group).get_future(), _start(group).get_future()]),
    "collect_all's futures": lambda group: torch.futures.collect_all([_start(group).get_future()]).wait()[0].value(),
    "_create_work_from_future": lambda group: torch._C._distributed_c10d._create_work_from_future(
        _start(group).get_future()
    ).wait(),
    "dropped": _drop,
}
"""What a script does with the work of an asynchronous call."""


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
        tensor = torch.distributed.tensor.DTensor.from_local(tensor.to_local(), _mesh(group), [source], run_check=False)
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
    return lambda: optimizer.consolidate_state_dict(to=_root(group))


def _model_averager(group: Any) -> Call:
    model = torch.nn.Linear(6, 8)
    averager = PeriodicModelAverager(period=1, process_group=group)
    averager.average_parameters(model.parameters())
    return lambda: averager.average_parameters(model.parameters())


def _broadcast_state(group: Any) -> Call:
    model = torch.nn.Linear(6, 8)
    fully_shard(model, mesh=_mesh(group))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = torch.nn.Linear(6, 8).state_dict() if group.rank() == 0 else {}
    return lambda: set_model_state_dict(model, state, options=options)


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
    "checkpoint broadcast_from_rank0": _broadcast_state,
    "clip_grad_norm_ of FSDP2": _clip,
}
"""Other parts of `torch.distributed`."""

CALLERS: dict[str, Prepare] = {
    **{name: (lambda group, call=call: lambda: call(group)) for name, call in (CALLS | FUTURES).items()},
    **DDP,
    **LIBRARIES,
}
