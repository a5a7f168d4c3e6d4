"""A device without elements in place of a GPU, to see where operators and collectives on offloaded pieces run."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankless.compiler.scheduling.parameter_gathers import GatherOfParameters
from rankless.jobs.state_division import make_default_plan
from rankless.ownership import sharded_state_owner
from rankless.ownership.shard_layout import ShardGroup, ShardLayout
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import Shard

aten = torch.ops.aten

DEVICE = "meta"
DIVIDED = {"model.even", "model.uneven", "model.transposed"}


class Done:
    """A collective that has ended."""

    def wait(self):
        return True


class WithoutElements(TorchDispatchMode):
    """Within the context, tensors may be copied from the device to the host, and an operator takes one device only."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            return args[0]
        if func is aten._foreach_copy_.default:
            return None
        if func is aten._to_copy.default:
            return args[0].new_empty(
                args[0].shape, **{key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            )
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor) and item.dim()]
        assert len({item.device for item in tensors}) < 2, (func, [(item.device, item.shape) for item in tensors])
        return func(*args, **kwargs)


class DeviceWorkers:
    """Two workers of which this is the first. Their collectives note the devices of their tensors."""

    def __init__(self, monkeypatch):
        self.devices = []
        monkeypatch.setattr(torch.Tensor, "tolist", lambda item: [0] * item.numel())
        for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
            monkeypatch.setattr(dist, name, self.note)
        self.axis = MeshAxis(name="data", role="data", rank=0, size=2, group=self)

    def note(self, *arguments, **_options):
        self.devices += [item.device.type for item in arguments if isinstance(item, torch.Tensor)]
        return Done()


class Shapes(nn.Module):
    """Parameters of several layouts: even, uneven, transposed, and one too small to divide."""

    def __init__(self):
        super().__init__()
        self.even = nn.Parameter(torch.empty(4, 6, device=DEVICE))
        self.uneven = nn.Parameter(torch.empty(3, 5, device=DEVICE))
        self.transposed = nn.Parameter(torch.empty(6, 4, device=DEVICE).t())
        self.small = nn.Parameter(torch.empty(1, device=DEVICE))


def divide(workers, model, optimizer, zero):
    tensors = {f"model.{name}": item for name, item in model.named_parameters()}
    mesh = Mesh(rank=0, size=2, device=torch.device(DEVICE), axes=(workers.axis,))
    owner = ShardedStateOwner(workers.axis, lambda _operation: None)
    plan = make_default_plan(tensors, [optimizer], mesh, zero, offload=True)
    offloaded = {name for name, state in plan.states.items() if state.offloaded}
    assert offloaded == (set(tensors) if isinstance(optimizer, torch.optim.Adafactor) else DIVIDED)
    owner.divide(plan, tensors, line="here")
    owner.begin_call()
    return owner, tensors


def make_gradients(owner, tensors):
    """Return the gradients of a program: this worker's pieces, or whole ones."""
    gradients = []
    for tensor in tensors.values():
        placements = owner.find_gradient_placements(tensor).values()
        shape = tensor.shape
        for placement in placements:
            shape = ShardLayout.of(tensor, placement).shard_shape(0)
        gradients.append(torch.empty(shape, device=DEVICE))
    return gradients


def check_steps(monkeypatch, zero, name):
    """The optimizer gets pieces and gradients of the host, and whole parameters on the device."""
    monkeypatch.setattr(sharded_state_owner, "share_state", lambda *_: None)  # it sends bytes of the other worker
    with WithoutElements():
        workers, model = DeviceWorkers(monkeypatch), Shapes()
        kind = getattr(torch.optim, name)
        optimizer = kind(model.parameters())
        owner, tensors = divide(workers, model, optimizer, zero)
        seen, original = [], kind.step

        def step(self):
            for group in self.param_groups:
                seen.extend((item.device.type, item.grad.device.type) for item in group["params"])
            return original(self)

        monkeypatch.setattr(kind, "step", step)
        for _ in range(2):
            owner.begin_call()
            owner.take_gradients(list(tensors.values()), make_gradients(owner, tensors))
            holders = owner.get_holders(list(tensors.values()))
            norm = owner.measure_norm(holders)
            assert norm.dim() == 0
            clip_grads_with_norm_([each for each in holders if each.grad is not None], 1.0, norm)
            assert owner.find_not_finite(holders) is None
            owner.step(optimizer)
            owner.end_call()
        assert ("cpu", "cpu") in seen
        whole = 0 if name == "Adafactor" else 2  # the small one, in both steps
        assert seen.count((DEVICE, DEVICE)) == whole == len(seen) - seen.count(("cpu", "cpu"))
        assert set(workers.devices) == {DEVICE}, workers.devices
        for parameter in tensors.values():
            assert parameter.device.type == DEVICE
            for value in optimizer.state[parameter].values():
                assert value.dim() == 0 or value.device.type == DEVICE


def check_values(monkeypatch):
    """Reads and changes of the script, gathered gradients and optimizer state are on the device."""
    with WithoutElements():
        workers, model = DeviceWorkers(monkeypatch), Shapes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        owner, tensors = divide(workers, model, optimizer, "parameters")
        assert {owner.get_value(tensors[name]).device.type for name in DIVIDED} == {"cpu"}
        assert (model.even * 2).device.type == DEVICE
        with torch.no_grad():
            model.transposed.mul_(0.5)
            model.uneven.data = torch.empty(3, 5, device=DEVICE)
        owner.begin_call()
        owner.take_gradients(list(tensors.values()), make_gradients(owner, tensors))
        assert owner.gather_gradient(model.even).device.type == DEVICE
        assert owner.divide_gradient(model.even, torch.empty(4, 6, device=DEVICE)).device.type == "cpu"
        owner.set_value(model.even, torch.empty(4, 6, device=DEVICE))
        kept = model.even.data
        owner.step(optimizer)
        owner.end_call()
        assert kept.device.type == DEVICE
        state = optimizer.state[model.uneven]["exp_avg"]
        assert state.partition.shard.device.type == "cpu"
        assert (state + 1).device.type == DEVICE
        assert set(workers.devices) == {DEVICE}, workers.devices


def check_gathers(monkeypatch):
    """Pieces of the host become whole values on the device."""
    with WithoutElements():
        workers = DeviceWorkers(monkeypatch)
        layouts = (ShardLayout((4, 6), (0, 1), Shard(0, (2, 2))), ShardLayout((3, 5), (0, 1), Shard(0, (2, 1))))
        for chosen in (layouts, layouts[:1]):
            gather = GatherOfParameters(workers.axis, ShardGroup(chosen, 2), torch.device(DEVICE))
            wholes = gather.finish(gather.start(*(torch.empty(layout.shard_shape(0)) for layout in chosen)))
            found = [(tuple(whole.shape), whole.device.type) for whole in wholes]
            assert found == [(layout.shape, DEVICE) for layout in chosen], found
        assert set(workers.devices) == {DEVICE}, workers.devices
