"""Memory of parameters that workers share: who waits for whom, who gets it, and when it is released."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import list_open, make_group, shared_group
from support.processes import on_mesh
from torch import nn

import rankless
from rankless.collectives.backends import close_shared_memory_group, shared_memory_mapping
from rankless.context.world import RunSettings, World
from rankless.deferred_models.deferred_tensor import DeferredTensor
from rankless.errors import CollectiveError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.ownership import adjacent_shards_in_shared_memory
from rankless.parallel.mesh import Mesh

PAUSE_SECONDS = 0.3
"""How much later a slow worker is. No assertion depends on it: a worker that did not wait would read other values."""


class SlowPrograms:
    """Lets one worker come late to its programs."""

    def __init__(self):
        self.is_slow = False

    def record(self, _job, _local):
        pass

    def run(self, _job, bound, values, sizes):
        if self.is_slow:
            time.sleep(PAUSE_SECONDS)
        return bound.local(values, sizes)

    def finish(self, _known):
        pass


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def make_batches(count=5):
    generator = torch.Generator(torch.get_default_device()).manual_seed(6)
    return [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


class Training:
    """A model, a train job and a job that reads the parameters without a collective, in a world of their own."""

    def __init__(self, mesh, model=None, zero="parameters", **options):
        self.programs = SlowPrograms()
        world = World(
            mesh=mesh, notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(programs=self.programs)
        )
        self.model = model = make_model() if model is None else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.train = make_job(
            lambda x: model(x).square().mean(),
            model=model,
            optimizer=self.optimizer,
            view="consistent",
            world=lambda: world,
            step_options=StepOptions(zero=zero, **options),
        )
        self.read = make_job(
            lambda: torch.cat([item.detach().flatten() for item in model.parameters()]),
            model=model,
            optimizer=None,
            view="consistent",
            world=lambda: world,
            step_options=StepOptions(),
        )

    @property
    def shared(self):
        """How many parameters are in shared memory."""
        return sum(self.train.owner.find_shared_memory(item) is not None for item in self.model.parameters())


def on_group(mesh, group):
    return Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group)


def train_with_slow_programs(mesh):
    """Rank 1 reads parameters late, while rank 0 goes on to a step that needs nothing of rank 1."""
    with shared_group(mesh) as group:
        training, found = Training(on_group(mesh, group), accumulate=2), []
        training.read()
        for batch in make_batches():
            training.train(batch)
            training.train.flush()
            training.train(batch)
            training.programs.is_slow = mesh.rank == 1
            found.append(training.read())
            training.programs.is_slow = False
            training.train.flush()
        return found, training.shared


def train_plainly_with_flushes():
    training, found = Training(Mesh.solo(), zero=None), []
    model, optimizer = training.model, training.optimizer
    for batch in make_batches():
        for number in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if number == 1:
                found.append(torch.cat([item.detach().flatten() for item in model.parameters()]))
            optimizer.step()
    return found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
def test_no_worker_steps_while_another_still_reads(size):
    wanted = train_plainly_with_flushes()
    for found, shared in on_mesh(size, train_with_slow_programs):
        assert shared == (4 if size == 2 else 2)  # a third of 8 rows is too uneven, so columns are divided
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def train_with_slow_steps(mesh):
    """Rank 1 steps late, while rank 0 goes on to a program that reads the parameters."""
    with shared_group(mesh) as group:
        training, found = Training(on_group(mesh, group)), []
        step = training.optimizer.step

        def step_late():
            if mesh.rank == 1:
                time.sleep(PAUSE_SECONDS)
            step()

        training.optimizer.step = step_late
        for batch in make_batches():
            training.train(batch)
            found.append(training.read())
        return found, training.shared


def train_plainly():
    training, found = Training(Mesh.solo(), zero=None), []
    model, optimizer = training.model, training.optimizer
    for batch in make_batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        found.append(torch.cat([item.detach().flatten() for item in model.parameters()]))
    return found


def test_no_worker_reads_before_all_have_stepped():
    wanted = train_plainly()
    for found, shared in on_mesh(2, train_with_slow_steps):
        assert shared == 4
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def count_waits(mesh):
    """Return how often workers wait in a step, in calls that only read, and in one after a read of the script."""
    waits = []
    with shared_group(mesh) as group:
        training, (batch, *_) = Training(on_group(mesh, group), accumulate=2), make_batches()
        usual = adjacent_shards_in_shared_memory.wait_for_all
        adjacent_shards_in_shared_memory.wait_for_all = lambda among: (waits.append(None), usual(among=among))
        try:
            for _ in range(2):
                training.train(batch)
            found = []
            for calls in ([training.train], [training.read, training.read], [training.train]):
                waits.clear()
                for call in calls:
                    call(*[batch] * (call is training.train))
                found.append(len(waits))
            training.model[0].weight.sum()
            waits.clear()
            training.read()
            return [*found, len(waits)]
        finally:
            adjacent_shards_in_shared_memory.wait_for_all = usual


def test_workers_wait_only_between_writing_and_reading():
    assert on_mesh(2, count_waits) == [[1, 0, 1, 1]] * 2


def refuse_to_map(_descriptor, _byte_count):
    raise OSError


def train_without_memory(mesh, way):
    """Train where one worker cannot map the memory, or wants it for something else."""
    usual, region = adjacent_shards_in_shared_memory.map_common, shared_memory_mapping.SharedRegion

    def map_other(byte_count, terms, *, among):
        if mesh.rank == 1 and way == "no memory":
            shared_memory_mapping.SharedRegion = refuse_to_map
        if mesh.rank == 1 and way == "no agreement":
            terms += " and more"
        try:
            return usual(byte_count, terms, among=among)
        finally:
            shared_memory_mapping.SharedRegion = region

    adjacent_shards_in_shared_memory.map_common = map_other
    try:
        with shared_group(mesh) as group:
            training, found = Training(on_group(mesh, group)), []
            for batch in make_batches():
                training.train(batch)
                found.append(training.read())
            return found, training.shared
    finally:
        adjacent_shards_in_shared_memory.map_common = usual


@pytest.mark.parametrize("way", ["no memory", "no agreement"])
def test_without_memory_all_workers_gather(way):
    wanted = train_plainly()
    for found, shared in on_mesh(2, train_without_memory, way):
        assert shared == 0
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def end_training(mesh):
    """Return what is open before a training, during it, and after it."""
    with shared_group(mesh) as group:
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()  # starts the group's thread
        found = [list_open()]
        training = Training(on_group(mesh, group))
        training.train(make_batches()[0])
        shared = training.shared
        found.append(list_open())
        del training
        found.append(list_open())
        return shared, found


def test_the_memory_is_released_with_the_training():
    for shared, (before, during, after) in on_mesh(2, end_training):
        assert shared == 4
        assert len(during) > len(before)
        assert after == before


def outlive_group(mesh):
    """Return whether a piece is the same after the group is closed. A call then raises."""
    group = make_group(mesh, list(range(mesh.size)))
    training = Training(on_group(mesh, group))
    training.train(make_batches()[0])
    value = training.train.owner.get_value(training.model[0].weight)
    before = value.detach().clone()
    dist.barrier(group=mesh.group)
    close_shared_memory_group(group)
    with pytest.raises((CollectiveError, ValueError)):  # the latter if PyTorch looks the group up first
        training.train(make_batches()[0])
    return torch.equal(value, before)


def test_pieces_outlive_their_group():
    assert on_mesh(2, outlive_group) == [True, True]


def fail_on_one_worker(mesh):
    """Rank 1's rows have an index that is out of range. It aborts the group, which is of no more use; no rank hangs."""
    group = make_group(mesh, list(range(mesh.size)), timeout_seconds=5.0)
    torch.manual_seed(0)
    model = nn.Embedding(8, 4)
    world = World(mesh=on_group(mesh, group), notify=lambda _: None, send_record=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = make_job(
        lambda x: model(x).square().mean(),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(zero="parameters"),
    )
    rows = torch.arange(8)
    train(rows)
    errors = []
    for _ in range(2):
        try:
            train(torch.where(rows == 7, 99, rows))
        except Exception as error:
            errors.append(type(error).__name__)
        dist.barrier(group=mesh.group)  # both have left the call, and the group is open again
        if mesh.rank == 1:
            group.abort()
    dist.barrier(group=mesh.group)
    close_shared_memory_group(group)
    return errors


def test_an_error_of_one_worker_is_raised_by_all_and_an_aborted_group_ends_all_calls():
    first, second = on_mesh(2, fail_on_one_worker)
    assert first == ["IndexError", "CollectiveError"]
    assert second == ["IndexError", "IndexError"]


def fork_while_training(mesh):
    """A child process, as of a DataLoader, lives while the parent trains, and reads a copy of the model."""
    with shared_group(mesh) as group:
        training, found = Training(on_group(mesh, group)), []
        batches = make_batches()
        training.train(batches[0])
        copied = copy.deepcopy(training.model)
        training.train(batches[1])
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            is_refused = False
            try:
                training.model[0].weight.sum()
            except rankless.RanklessError:
                is_refused = True
            total = float(sum(item.detach().sum() for item in copied.parameters()))
            os.write(writer, f"{is_refused} {total!r}".encode())
            os._exit(0)
        for batch in batches[2:]:
            training.train(batch)
            found.append(training.read())
        os.waitpid(child, 0)
        text = os.read(reader, 200).decode()
        os.close(reader)
        os.close(writer)
        return text, f"True {float(sum(item.detach().sum() for item in copied.parameters()))!r}", found


def test_a_forked_child_neither_reads_nor_changes_shared_parameters():
    wanted = train_plainly()[2:]
    for text, known, found in on_mesh(2, fork_while_training):
        assert text == known
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def train_deferred(mesh):
    """Train a model whose values are computed tensor by tensor while it is divided."""
    with shared_group(mesh) as group:
        with rankless.deferred():
            model = make_model()
        assert isinstance(model[0].weight, DeferredTensor)
        training, found = Training(on_group(mesh, group), model), []
        for batch in make_batches():
            training.train(batch)
            found.append(training.read())
        memories = {training.train.owner.find_shared_memory(item) for item in model.parameters()}
        return found, memories


def test_a_deferred_model_is_computed_into_one_shared_memory():
    wanted = train_plainly()
    for found, memories in on_mesh(2, train_deferred):
        assert memories == {1}
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
