"""Participants hear of loaders and jobs in the order that Note [order of step events] states."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rankless.context.step_events import StepEvents, StepLimit, StepParticipant
from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.errors import StepsDone
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh


class Listener(StepParticipant):
    """Writes down what it hears."""

    def __init__(self, heard: list[str], name: str = "") -> None:
        self._heard, self._name = heard, name

    def _add(self, text: str) -> None:
        self._heard.append(f"{self._name}{text}")

    def begin_pass(self, _pass: Any, *, batches: int | None) -> None:
        self._add(f"begin_pass {batches}")

    def begin_batch(self, _pass: Any, *, rows: int) -> None:
        self._add(f"begin_batch {rows}")

    def end_pass(self, _pass: Any) -> None:
        self._add("end_pass")

    def begin_call(self, job: Any) -> None:
        self._add(f"begin_call {job.name}")

    def begin_capture(self, job: Any) -> None:
        self._add(f"begin_capture {job.name}")

    def end_call(self, job: Any, result: Any, loss: Any) -> None:
        self._add(f"end_call {job.name} {'train' if loss is not None else 'predict'} {tuple(result.shape)}")

    def end_step(self, job: Any) -> None:
        self._add(f"end_step {job.name}")

    def close(self, *, stopped: bool) -> None:
        self._add(f"close {stopped}")


class Script:
    """A model with a loader, a train job and a predict job, all heard by `participants`."""

    def __init__(self, *participants: StepParticipant, accumulate: int = 1) -> None:
        self.events = StepEvents(participants)
        world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None, events=self.events)
        self.model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = Loader(TensorDataset(torch.rand(5, 2)), options=LoaderOptions(batch_size=2), world=lambda: world)

        def train(rows):
            return self.model(rows).mean()

        def predict(rows):
            return self.model(rows)

        options: dict[str, Any] = {"model": self.model, "view": "consistent", "world": lambda: world}
        steps = StepOptions(accumulate=accumulate)
        self.train = make_job(train, optimizer=optimizer, step_options=steps, **options)
        self.predict = make_job(predict, optimizer=None, step_options=StepOptions(), **options)


def test_a_step_and_a_prediction():
    heard: list[str] = []
    script = Script(Listener(heard))
    script.train(torch.rand(4, 2))
    script.predict(torch.rand(3, 2))
    script.events.close(stopped=False)
    assert heard == [
        "begin_call train",
        "end_call train train ()",
        "end_step train",
        "begin_call predict",
        "end_call predict predict (3, 1)",
        "close False",
    ]


def test_a_pass_with_accumulated_calls():
    """The last step of the pass has one call: the last batch is known to be the last one."""
    heard: list[str] = []
    script = Script(Listener(heard), accumulate=2)
    for (rows,) in script.loader:
        script.train(rows)
    assert [each for each in heard if not each.startswith("begin_capture")] == [
        "begin_pass 3",
        "begin_batch 2",
        "begin_call train",
        "end_call train train ()",
        "begin_batch 2",
        "begin_call train",
        "end_call train train ()",
        "end_step train",
        "begin_batch 1",
        "begin_call train",
        "end_call train train ()",
        "end_step train",
        "end_pass",
    ]
    assert heard[3].startswith("begin_capture train")  # accumulated losses are captured on one device, too


def test_the_step_of_the_last_calls_of_a_pass_comes_before_its_end():
    """Two calls per batch: that the last one is the last call is known at the end of the pass only."""
    heard: list[str] = []
    script = Script(Listener(heard), accumulate=4)
    for (rows,) in script.loader:
        script.train(rows)
        script.train(rows)
    assert heard[-2:] == ["end_step train", "end_pass"]
    assert heard.count("end_step train") == 2


def test_a_loop_that_is_left_and_a_call_that_raises_have_no_end():
    heard: list[str] = []
    script = Script(Listener(heard))
    for _ in script.loader:
        break
    with pytest.raises(RuntimeError):
        script.train(torch.rand(4, 3))
    assert heard == ["begin_pass 3", "begin_batch 2", "begin_call train"]


def test_participants_hear_each_event_in_their_order_and_the_last_may_end_the_script():
    heard: list[str] = []
    script = Script(
        Listener(heard, "1 "), Listener(heard, "2 "), StepLimit(1, at_end=lambda: script.events.close(stopped=True))
    )
    with pytest.raises(StepsDone):
        script.train(torch.rand(4, 2))
    assert heard == [
        f"{number} {event}"
        for event in ("begin_call train", "end_call train train ()", "end_step train", "close True")
        for number in (1, 2)
    ]


def test_one_that_compares_values_is_enough():
    class Comparing(StepParticipant):
        compares_values = True

    assert StepEvents([StepParticipant(), Comparing()]).compares_values
    assert not StepEvents([StepParticipant()]).compares_values
