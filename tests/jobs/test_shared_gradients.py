"""Gradients in memory that workers share: trainings are exact whatever the script keeps, and the memory is released."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS, list_open, make_group, shared_group
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.collectives.backends import close_shared_memory_group, shared_tensor_memory
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import FlatMemory
from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

pytestmark = NEEDS_SHARED_GROUPS
STEPS = 6
LENGTHS = [12, 8, 12, 6, 8, 4]
WAYS = [
    "nothing kept",
    "all kept",
    "kept on one worker",
    "kept and changed",
    "varying lengths",
    "accumulated",
    "two jobs",
]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    # More than 64 KiB of gradients in float64, and several buckets.
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def make_batches(way: str) -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(6)
    lengths = LENGTHS if way == "varying lengths" else [12] * STEPS
    return [torch.randn(length, 40, generator=generator, dtype=torch.float64) for length in lengths]


def train_plainly(way: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the parameters, and the gradients of every step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for number, batch in enumerate(make_batches(way)):
        (model(batch).square().mean() / (2 if way == "accumulated" else 1)).backward()
        kept.append([item.grad.clone() for item in model.parameters() if item.grad is not None])
        if way != "accumulated" or number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [item.detach() for item in model.parameters()], kept


def make_training(mesh: Mesh, accumulate: int = 1) -> tuple[nn.Module, Any]:
    model = make_model()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = make_job(
        lambda batch: model(batch).square().mean(),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=accumulate),
    )
    return model, job


def count_shared() -> int:
    """Return how many tensors of groups this process has mapped. Each group has one mapping more."""
    return sum(name.startswith("/memfd:") and "(deleted)" in name for name in list_open()) // 2 - 1


def train_shared(mesh: Mesh, way: str) -> tuple[list[Tensor], list[list[Tensor]], int]:
    """Return the parameters, the gradients that the script keeps, and the number of shared buckets."""
    with shared_group(mesh) as group:
        on_group = Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group)
        model, job = make_training(on_group, accumulate=2 if way == "accumulated" else 1)
        other_model, other = make_training(on_group)
        kept = []
        for batch in make_batches(way):
            job(batch)
            gradients = [item.grad for item in model.parameters()]
            if way == "all kept" or (way == "kept on one worker" and mesh.rank == 1):
                kept.append(gradients)
            else:
                kept.append([item.clone() for item in gradients])
            if way == "kept and changed" and mesh.rank == 0:
                kept[-1] = [item.clone() for item in gradients]
                for gradient in gradients:
                    gradient.fill_(1e9)
            if way == "two jobs":
                other(batch)
        if way == "two jobs":
            for own, others in zip(model.parameters(), other_model.parameters(), strict=True):
                assert torch.equal(own, others)
        return [item.detach() for item in model.parameters()], kept, count_shared()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_with_shared_gradients_equals_the_plain_one(way: str, size: int):
    parameters, gradients = train_plainly(way)
    for found, kept, shared in on_mesh(size, train_shared, way):
        assert shared > 0
        torch.testing.assert_close(found, parameters, rtol=0, atol=1e-12)
        if way != "accumulated":
            torch.testing.assert_close(kept, gradients, rtol=0, atol=1e-12)


def end_jobs(mesh: Mesh) -> list[list[str]]:
    """Return what is open before, while two jobs live, when one is gone, and when both are."""
    with shared_group(mesh) as group:
        on_group = Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group)
        batch = make_batches("nothing kept")[0]
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()  # starts the group's thread
        found = [list_open()]
        first, second = make_training(on_group), make_training(on_group)
        for training in (first, second):
            training[1](batch)
            training[1](batch)
        found.append(list_open())
        del training, first
        found.append(list_open())
        del second
        found.append(list_open())
        return found


@pytest.mark.exhaustive
def test_shared_gradients_are_released_with_their_job():
    for before, both, one, none in on_mesh(2, end_jobs):
        assert len(both) > len(one) > len(before)
        assert none == before


def close_group_before_job(mesh: Mesh) -> tuple[list[str], list[str], list[str]]:
    """Return what is open before the group, when it is closed but a job lives, and when that is gone."""
    before = list_open()
    group = make_group(mesh, list(range(mesh.size)))
    model, job = make_training(Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group))
    job(make_batches("nothing kept")[0])
    dist.barrier(group=mesh.group)
    gradients = [item.grad.clone() for item in model.parameters()]
    close_shared_memory_group(group)
    during = list_open()
    assert all(torch.equal(item.grad, known) for item, known in zip(model.parameters(), gradients, strict=True))
    del job, model
    return before, during, list_open()


def test_gradients_outlive_their_group_and_are_then_released():
    for before, during, after in on_mesh(2, close_group_before_job):
        assert len(during) > len(before)
        assert after == before


def find_places(mesh: Mesh) -> tuple[list[int], list[int]]:
    """Return where a gradient is while nobody keeps it, and after one that was kept for a while is gone."""
    with shared_group(mesh) as group:
        model, job = make_training(Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group))
        batch, places, kept = make_batches("nothing kept")[0], [], []
        for step in range(6):
            job(batch)
            places.append(model[2].weight.grad.data_ptr())
            if step in (1, 2) and mesh.rank == 1:
                kept.append(model[2].weight.grad)
            else:
                kept.clear()
        return places[:2], places[2:]


def test_a_worker_returns_to_shared_memory_when_gradients_are_no_longer_kept():
    others, keeper = on_mesh(2, find_places)
    assert len({*others[0], *others[1]}) == 1
    assert len(set(keeper[0])) == 1
    assert len({*keeper[0], *keeper[1]}) == 3
    assert keeper[1][-2:] == keeper[0]


def close_group_of_idle_memory(mesh: Mesh) -> tuple[int, int]:
    """Return how many tensors of a group are mapped before and after the group is closed, while their owner lives."""
    group = make_group(mesh, list(range(mesh.size)))
    flat = FlatMemory(
        100_000,
        torch.float32,
        mesh.device,
        lambda release: group.allocate(100_000, torch.float32, on_close=release),
    )
    flat.renew()
    before = len(list_open())
    dist.barrier(group=mesh.group)
    close_shared_memory_group(group)
    return before, len([name for name in list_open() if name.startswith("/memfd:")])


def test_a_closed_group_takes_back_memory_that_no_gradient_uses():
    for before, after in on_mesh(2, close_group_of_idle_memory):
        assert before > 0
        assert after == 0


def train_within_limit(mesh: Mesh, limit_bytes: int) -> tuple[list[Tensor], int]:
    """Limit the memory on one worker only."""
    usual = shared_tensor_memory.MOST_BYTES
    shared_tensor_memory.MOST_BYTES = limit_bytes if mesh.rank == 1 else usual
    try:
        parameters, _, shared = train_shared(mesh, "nothing kept")
    finally:
        shared_tensor_memory.MOST_BYTES = usual
    return parameters, shared


def test_without_enough_memory_gradients_are_private():
    expected, _ = train_plainly("nothing kept")
    for found, shared in on_mesh(2, train_within_limit, 1000):
        assert shared == 0
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
