"""What a worker holds with divided states, in bytes."""

import pytest
import torch
from support.metered_calls import MeteredCalls
from support.processes import on_mesh
from torch import nn

from bench.models import GPT
from rankless.context.world import RunSettings, World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.jobs.memory_meter import count_local_bytes
from rankless.ownership.partitioned_tensor import find_partition

LAYERS, WIDTH = 24, 512
BLOCK_BYTES = WIDTH * WIDTH * 4


def make_metered(mesh, model, optimizer, zero):
    """Return a world, the meter of its programs, and a train job."""
    meter = MeteredCalls()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(programs=meter))
    options = StepOptions(zero=zero)

    def loss(x):
        return model(x).square().mean()

    job = make_job(loss, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=options)
    return world, meter, job


def train(mesh, zero):
    """Return this worker's bytes of parameters, gradients and optimizer state, and its peaks in the program."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world, meter, job = make_metered(mesh, model, optimizer, zero)
    for _ in range(3):
        job(torch.ones(4, WIDTH))
    holders = world.owner.get_holders(list(model.parameters()))
    return {
        "parameters": sum(map(count_local_bytes, model.parameters())),
        "gradients": sum(holder.grad.nbytes for holder in holders if holder.grad is not None),
        "state": sum(count_local_bytes(value) for entries in optimizer.state.values() for value in entries.values()),
        "memory of parameters": sum(parameter_memory(item) for item in model.parameters()),
        "peak": meter.peaks[-1],
    }


def parameter_memory(parameter):
    """Return the memory that a parameter really takes: that of its storage, or of its piece's."""
    partition = find_partition(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        own = parameter.untyped_storage().nbytes()
    return own if partition is None else own + partition.shard.untyped_storage().nbytes()


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("zero", [None, "optimizer", "gradients", "parameters"])
def test_a_worker_holds_its_part_of_what_is_divided(zero):
    whole = LAYERS * BLOCK_BYTES
    for held in on_mesh(2, train, zero):
        assert held["parameters"] == held["memory of parameters"]
        assert held["parameters"] == (whole // 2 if zero == "parameters" else whole)
        assert held["gradients"] == (whole // 2 if zero in ("gradients", "parameters") else whole)
        scalars = LAYERS * 4
        assert held["state"] == scalars + (2 * whole if zero is None else whole)


def test_few_whole_parameters_and_gradients_exist_at_any_time():
    activations = 2 * LAYERS * 4 * WIDTH * 4
    for held in on_mesh(2, train, "parameters"):
        # Two groups of parameters, and a piece of one. Gradients are computed where they are summed, and that memory
        # exists before.
        assert held["peak"] <= 3 * BLOCK_BYTES + activations, held["peak"] / BLOCK_BYTES
        assert held["peak"] >= 2 * BLOCK_BYTES
    for held in on_mesh(2, train, "gradients"):
        assert held["peak"] <= activations, held["peak"] / BLOCK_BYTES


def read_between_calls(mesh):
    """Return which parameters are whole after a read of the script, and after the next call."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    _, _, job = make_metered(mesh, model, torch.optim.SGD(model.parameters(), lr=0.1), "parameters")
    found = []
    job(torch.ones(4, 8))
    for _ in range(2):
        found.append([item.partition.whole is not None for item in model.parameters()])
        if len(found) == 1:
            sum(item.sum() for item in model.parameters()).backward()
            found.append([item.partition.whole is not None for item in model.parameters()])
            job(torch.ones(4, 8))
    return found


def test_whole_parameters_that_the_script_has_read_are_freed_at_the_next_call():
    for before, read, after in on_mesh(2, read_between_calls):
        assert not any(before)
        assert all(read)
        assert not any(after)


def train_gpt(mesh):
    """Return this worker's state between calls, the peak within a call, and the bytes of the model and of a block."""
    torch.manual_seed(0)
    model = GPT(layers=12, width=256)
    optimizer = torch.optim.AdamW(model.parameters())
    world, meter, job = make_metered(mesh, model, optimizer, "parameters")
    for _ in range(3):
        job(torch.ones(4, 8, dtype=torch.long))
    held = [*model.parameters(), *(value for entries in optimizer.state.values() for value in entries.values())]
    gradients = [holder.grad for holder in world.owner.get_holders(list(model.parameters()))]
    state = sum(map(count_local_bytes, [*held, *(item for item in gradients if item is not None)]))
    return state, meter.peaks[-1], count_bytes(model), count_bytes(model.blocks[0])


def count_bytes(model):
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.exhaustive
def test_four_workers_hold_a_quarter_and_gather_a_block():
    """With parameters, gradients and two states of AdamW; the peak within a call has activations too."""
    for state, peak, whole, block in on_mesh(4, train_gpt):
        assert state + peak <= 1.1 * (4 * whole / 4 + block)
