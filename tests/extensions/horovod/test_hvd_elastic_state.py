"""`hvd.elastic` without a launcher: states, the sampler, and the loop around a training function."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import rankless.extensions.horovod.torch as hvd
from rankless.extensions.horovod.common.elastic import ObjectState, State, run_fn
from rankless.extensions.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from rankless.extensions.horovod.torch.elastic import sampler as sampler_module
from rankless.extensions.horovod.torch.elastic.sampler import ElasticSampler
from rankless.extensions.horovod.torch.elastic.state import (
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    world = SimpleNamespace(rank=rank, size=size)
    monkeypatch.setattr(sampler_module, "context", SimpleNamespace(current=lambda: SimpleNamespace(world=world)))


def shares(monkeypatch: pytest.MonkeyPatch, size: int, done: int = 0, **options: object) -> list[list[int]]:
    found = []
    for rank in range(size):
        be(monkeypatch, rank, size)
        one = ElasticSampler(list(range(10)), **options)
        one.load_state_dict({"epoch": 3, "processed_num": done})
        assert len(list(one)) == len(one)
        found.append(list(one))
    return found


def test_the_order_of_an_epoch_is_horovods_and_ranks_take_turns(monkeypatch: pytest.MonkeyPatch):
    order = list(range(10))
    random.Random(5 + 3).shuffle(order)
    assert shares(monkeypatch, 2, seed=5) == [order[0::2], order[1::2]]
    assert shares(monkeypatch, 2, shuffle=False) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_the_rest_of_an_epoch_is_divided_and_padded_from_its_start(monkeypatch: pytest.MonkeyPatch):
    assert shares(monkeypatch, 4, done=4, shuffle=False) == [[4, 8], [5, 9], [6, 4], [7, 5]]


def test_fewer_samples_than_ranks_are_repeated_until_each_has_one(monkeypatch: pytest.MonkeyPatch):
    assert shares(monkeypatch, 5, done=8, shuffle=False) == [[8], [9], [8], [9], [8]]
    assert shares(monkeypatch, 3, done=10, shuffle=False) == [[], [], []]


def test_a_batch_counts_for_all_ranks_and_a_new_epoch_starts_at_zero(monkeypatch: pytest.MonkeyPatch):
    be(monkeypatch, 1, 3)
    one = ElasticSampler(list(range(10)), shuffle=False)
    one.record_batch(0, 2)
    assert one.state_dict() == {"epoch": 0, "processed_num": 6}
    assert list(one) == [1, 4, 7, 0]  # the rest is divided anew only by a reset
    one.reset()
    assert list(one) == [7, 6]
    one.set_epoch(1)
    assert one.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(one) == 4


@pytest.mark.usefixtures("alone")
def test_a_state_is_restored_completely_to_its_last_commit():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, losses=[], epoch=0)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        state.losses.append(0.5)
        state.epoch += 1

    step()
    state.commit()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    momentum = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    step()
    state.restore()
    assert all(torch.equal(now, before) for now, before in zip(model.parameters(), kept, strict=True))
    for parameter, before in zip(model.parameters(), momentum, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], before)
    assert (state.epoch, state.losses, scheduler.last_epoch) == (1, [0.5], 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    state.losses.append(2.0)
    state.restore()
    assert state.losses == [0.5]


@pytest.mark.usefixtures("alone")
def test_a_synchronized_state_counts_as_the_last_commit():
    state = TorchState(model=torch.nn.Linear(1, 1), batch=0)
    with torch.no_grad():
        state.model.weight.fill_(4)
    state.batch = 7
    state.sync()
    with torch.no_grad():
        state.model.weight.fill_(5)
    state.batch = 8
    state.restore()
    assert (state.model.weight.item(), state.batch) == (4, 7)


@pytest.mark.usefixtures("alone")
def test_another_model_replaces_the_first():
    state = TorchState(model=torch.nn.Linear(1, 1))
    other = state.model = torch.nn.Linear(3, 3)
    state.restore()
    assert state.model is other


@pytest.mark.usefixtures("alone")
def test_users_register_handlers_for_their_own_types():
    class Counter:
        value = 0

    class CounterHandler(StateHandler):
        def save(self) -> None:
            self.saved = self.value.value

        def restore(self) -> None:
            self.value.value = self.saved

        def sync(self) -> None:
            self.save()

    before = get_handler_registry()
    set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
        counter.value = 3
        state.commit()
        counter.value = 4
        state.restore()
        assert state.counter is counter
        assert counter.value == 3
    finally:
        set_handler_registry(before)


class Written(State):
    """A state that writes down what is done with it."""

    def __init__(self) -> None:
        super().__init__(lambda thing: thing, lambda: 0)
        self.calls: list[str] = []
        self.register_reset_callbacks([lambda: self.calls.append("callback")])

    def save(self) -> None:
        self.calls.append("save")

    def restore(self) -> None:
        self.calls.append("restore")

    def sync(self) -> None:
        self.calls.append("sync")

    def reset(self) -> None:
        self.calls.append("state.reset")


def run(*happenings: Exception | int) -> tuple[list[str], object]:
    """What is done with a state when a function meets with these, one after the other."""
    state, left = Written(), list(happenings)

    def train(state: Written) -> object:
        state.calls.append("train")
        happening = left.pop(0)
        if isinstance(happening, Exception):
            raise happening
        return happening

    result = run_fn(train, lambda: state.calls.append("reset"))(state)
    return state.calls, result


RESET = ["reset", "state.reset", "callback"]


def test_a_function_that_returns_is_called_once():
    assert run(5) == (["sync", "train"], 5)


def test_after_a_failure_the_state_is_restored_and_synchronized():
    assert run(HorovodInternalError("gone"), 5) == (["sync", "train", "restore", *RESET, "sync", "train"], 5)


def test_after_hosts_were_added_the_current_state_is_synchronized():
    assert run(HostsUpdatedInterrupt(False), 5) == (["sync", "train", *RESET, "sync", "train"], 5)


def test_after_hosts_were_only_removed_no_synchronization_is_needed():
    assert run(HostsUpdatedInterrupt(True), 5) == (["sync", "train", *RESET, "train"], 5)


def test_other_exceptions_are_raised_to_the_script():
    with pytest.raises(KeyError):
        run(KeyError("mine"))


@pytest.mark.parametrize(("updates", "skips"), [((1,), True), ((2,), False), ((1, 2), False), ((1, 1), True)])
def test_hosts_that_have_changed_interrupt_at_the_next_commit(updates: tuple[int, ...], skips: bool):
    state = Written()
    state.commit()
    for timestamp, update in enumerate(updates, start=1):
        state.on_hosts_updated(timestamp, update)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skips
    assert state.calls == ["save", "save"]
    state.commit()  # reported once


def test_objects_of_a_state_are_its_attributes():
    state = ObjectState(bcast_object=lambda thing: thing, get_rank=lambda: 0, epoch=2, best={"loss": 1.0})
    state.best["loss"] = 0.5
    state.restore()
    assert (state.epoch, state.best) == (2, {"loss": 1.0})
