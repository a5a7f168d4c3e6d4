"""Measures calls of PyTorch's functions in the logical view, on plain rows, and on PyTorch's DTensor, alternately."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.alternating import measure_calls
from rankless.api import _world
from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.tensor import LogicalView, shard_rows

ROWS, WIDTH = 8, 16
PAIRS, CALLS, WARMUP = 41, 100, 200

world = _world()
rank, size = dist.get_rank(), dist.get_world_size()
view = LogicalView(world.mesh, world.notify)
gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
torch.manual_seed(0)
own, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)


def double(rows: Tensor, _: Tensor) -> Tensor:
    return rows * 2.0


def differentiate(rows: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer and its gradients, without the sum of gradients over the ranks."""
    result = F.linear(rows, weights)
    part = getattr(result, "local", result)
    part = part.to_local() if isinstance(part, DTensor) else part
    part.backward(part.detach())
    return result


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mul": (double, False),
    "linear": (F.linear, False),
    "linear_with_gradient": (F.linear, True),
    "forward_backward": (differentiate, True),
}
times: dict[str, dict[str, list[tuple[float, float]]]] = {}
for name, (call, needs_gradient) in CASES.items():
    plain = weight.clone().requires_grad_(needs_gradient)
    shared = DTensor.from_local(weight.clone(), gloo, [Replicate()]).requires_grad_(needs_gradient)
    divided, distributed = shard_rows(own.clone(), (ROWS,) * size, view), DTensor.from_local(own, gloo, [Shard(0)])
    sides: dict[str, Callable[[], object]] = {
        "plain PyTorch": partial(call, own, plain),
        "DTensor": partial(call, distributed, shared),
    }
    ours = partial(call, divided, plain)
    times[name] = {
        peer: measure_calls(ours, other, pairs=PAIRS, calls=CALLS, warmup=WARMUP) for peer, other in sides.items()
    }
if rank == 0:
    Path("times.json").write_text(json.dumps(times))
