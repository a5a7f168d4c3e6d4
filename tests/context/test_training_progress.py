"""The progress meter makes records from batches and steps, at a bounded rate."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.utils.data import TensorDataset

from rankless.context.progress_measurement import ProgressMeter
from rankless.context.step_events import StepEvents
from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.parallel.mesh import Mesh
from rankless.records.events import Progress


class Script:
    """A training script that sets its own clock."""

    def __init__(self, rows: int = 100) -> None:
        self.nanoseconds = 0
        self.records: list[Progress] = []
        self.losses_read = 0
        self.dataset = TensorDataset(torch.zeros(rows))
        self.totals: tuple[int, ...] = (0, 0, 0)
        self.rate = 0.0
        self.meter = ProgressMeter(
            rank=0, record=self.records.append, clock=lambda: self.nanoseconds, publish_totals=self.publish
        )

    def publish(self, steps: int, samples: int, nanoseconds: int, rate: float) -> None:
        self.totals, self.rate = (steps, samples, nanoseconds), rate

    def loader(self, **options: Any) -> Loader:
        world = World(mesh=Mesh.solo(), notify=print, send_record=print, events=StepEvents([self.meter]))
        return Loader(self.dataset, options=LoaderOptions(batch_size=10, **options), world=lambda: world)

    def train(self, seconds: float, job: str = "train") -> None:
        self.nanoseconds += round(seconds * 1e9)
        self.meter.record_step(job=job, loss=self.read_loss)

    def read_loss(self) -> float:
        self.losses_read += 1
        return 0.5

    def positions(self) -> list[tuple[int, int]]:
        return [(record.epoch, record.step) for record in self.records]


def epochs_of_one_loader(script: Script) -> None:
    loader = script.loader()
    for _ in range(2):
        for _ in loader:
            script.train(0.0625)


def epochs_of_new_loaders(script: Script) -> None:
    for _ in range(2):
        for _ in script.loader():
            script.train(0.0625)


def epochs_with_evaluation_between(script: Script) -> None:
    loader = script.loader()
    for _ in range(2):
        for step, _ in enumerate(loader):
            script.train(0.0625)
            if step == 4:
                list(script.loader())


@pytest.mark.parametrize("run", [epochs_of_one_loader, epochs_of_new_loaders, epochs_with_evaluation_between])
def test_the_meter_records_five_times_a_second_and_at_the_end_of_each_epoch(run: Callable[[Script], None]):
    script = Script()
    run(script)
    assert script.positions() == [(1, 1), (1, 5), (1, 9), (1, 10), (2, 4), (2, 8), (2, 10)]
    assert [record.last_of_epoch for record in script.records] == [step == 10 for _, step in script.positions()]
    assert script.losses_read == len(script.records)


def test_rate_and_time_left_are_averages_over_the_last_seconds():
    script = Script()
    batches = iter(script.loader())
    for seconds in [100, 20, 1, 1, 1, 1, 1]:
        next(batches)
        script.train(seconds)
    first, slow, *_, steady = script.records
    assert (first.samples_per_second, first.seconds_left) == (0.0, None)
    assert (slow.samples_per_second, slow.seconds_left) == (0.5, 160.0)
    assert (steady.samples_per_second, steady.seconds_left) == (10.0, 3.0)


def test_steps_that_capture_a_job_count_in_no_rate():
    script = Script()
    for step, _ in enumerate(script.loader()):
        if step in (0, 6):
            script.meter.begin_capture(ANY)
        script.train(30 if step in (0, 6) else 1)
    rates = [record.samples_per_second for record in script.records]
    assert rates == [0.0, *[10.0] * 9]
    assert script.totals == (10, 80, 8_000_000_000)


def test_without_records_the_meter_still_counts_and_reads_no_loss():
    script = Script()
    script.meter = ProgressMeter(rank=0, record=None, clock=lambda: script.nanoseconds, publish_totals=script.publish)
    for _ in range(2):
        for _ in script.loader():
            script.train(0.5, job="discriminator")
            script.train(0.5, job="generator")
    assert script.losses_read == 0
    assert script.totals == (20, 190, 19_000_000_000)


def test_two_jobs_on_one_batch_count_its_rows_once():
    script = Script()
    for _ in script.loader():
        script.train(0.5, job="discriminator")
        script.train(0.5, job="generator")
    last = script.records[-1]
    assert (last.job, last.epoch, last.step, last.steps_per_epoch) == ("generator", 1, 10, 10)
    assert last.samples_per_second == pytest.approx(10.0)
    assert last.seconds_left == 0.0


class WithoutLength:
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(30))


def test_without_a_known_length_the_last_step_is_recorded_at_the_end_of_the_pass():
    script = Script()
    for _ in script.loader(sampler=WithoutLength()):
        script.train(0.0625)
    assert script.positions() == [(1, 1), (1, 3)]
    assert [record.steps_per_epoch for record in script.records] == [None, None]
    assert [record.last_of_epoch for record in script.records] == [False, True]


def test_a_job_without_a_loader_counts_its_steps():
    script = Script()
    for _ in range(3):
        script.train(1.0)
    assert script.positions() == [(1, 1), (1, 2), (1, 3)]
    assert script.records[-1].seconds_left is None
