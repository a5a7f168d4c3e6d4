"""The causes that `verify` names in scripts that divide their own data, each from ranks simulated in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from rankless.records.verify_recording_format import ScriptSurvey, StepInputs
from rankless.verify.causes import find_cause, find_undivided
from rankless.verify.differences_beyond_tolerance import compare
from rankless.verify.read_and_combine_recordings import Recording, combine_losses, read_recordings
from rankless.verify.recording.run_recorder import RunRecorder

ONE = range(12)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank does in each of two steps."""

    samples: Sequence[int]
    gradient: float = 1.0
    loss: float = 2.0
    rate: float = 0.1
    start: float = 1.0
    layers: tuple[str, ...] = field(default=("Linear",))
    last: tuple[Sequence[int], float] | None = None
    """The samples and the loss of the second step, if they are others."""


def record(folder: Path, ranks: Sequence[Rank]) -> list[Recording]:
    for number, rank in enumerate(ranks):
        recorder = RunRecorder(str(folder), number, survey=lambda _, rank=rank: ScriptSurvey(layers=rank.layers))
        model = nn.Linear(3, 1, dtype=torch.float64)
        for parameter in model.parameters():
            nn.init.constant_(parameter, rank.start)
        recorder.register("model", model)
        tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank.gradient * (step + 1))
                parameter.data -= rank.rate * parameter.grad
            drawn, loss = rank.last if step and rank.last is not None else (rank.samples, rank.loss)
            losses = {"loss": torch.tensor(loss, dtype=torch.float64)}
            recorder.record_call(job="backward", line="train.py:9", results=losses)
            samples = tuple(sample + 100 * step for sample in drawn)
            recorder.record_tensors(
                job="backward", tensors=tensors, inputs=StepInputs((len(samples),), samples, (rank.rate,))
            )
        recorder.finish()
    found = read_recordings(str(folder), len(ranks))
    return [recording for recording in found if recording is not None]


def name_cause(folder: Path, ranks: Sequence[Rank], one: Rank | None = None) -> str | None:
    [alone] = record(folder / "one", [one or Rank(samples=ONE)])
    many = combine_losses(record(folder / "many", ranks))
    comparison = compare(alone, many, [alone])
    assert comparison.findings
    cause = find_cause(comparison.findings[0], alone, many)
    return None if cause is None else cause.name


HALVES = (range(0, 12, 2), range(1, 12, 2))


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([Rank(samples=ONE, loss=1.9), Rank(samples=ONE, loss=1.9)], "undivided data"),
        ([Rank(samples=ONE, loss=1.9), Rank(samples=range(12, 24))], "whole batch on every rank"),
        ([Rank(samples=half, rate=0.2) for half in HALVES], "learning rate"),
        ([Rank(samples=[*half, 0, 1], loss=1.9) for half in HALVES], "padded last batch"),
        ([Rank(samples=half[:-1], loss=1.9) for half in HALVES], "dropped samples"),
        ([Rank(samples=[index + 50 for index in half], loss=1.9) for half in HALVES], "other samples"),
        ([Rank(samples=half, gradient=2.0) for half in HALVES], "gradients summed"),
        ([Rank(samples=HALVES[0], gradient=0.5), Rank(samples=HALVES[1], gradient=1.5)], "gradients not reduced"),
        ([Rank(samples=HALVES[0]), Rank(samples=HALVES[1], start=3.0)], "different initial parameters"),
        ([Rank(samples=range(8), gradient=1.1), Rank(samples=range(8, 12), gradient=1.1)], "mean of means"),
        ([Rank(samples=half, loss=2.1) for half in HALVES], None),
    ],
)
def test_a_cause_is_named(tmp_path: Path, ranks: Sequence[Rank], cause: str | None) -> None:
    assert name_cause(tmp_path, ranks) == cause


@pytest.mark.parametrize("padding", [range(4), range(50, 54)])
def test_a_last_batch_padded_to_whole_batches_is_named_as_padded(tmp_path: Path, padding: Sequence[int]) -> None:
    last = [Rank(samples=HALVES[0], last=(range(4), 1.9)), Rank(samples=HALVES[1], last=(padding, 1.9))]
    assert name_cause(tmp_path, last, Rank(samples=ONE, last=(range(4), 2.0))) == "padded last batch"


def test_one_batch_of_few_samples_that_is_padded_is_not_a_whole_batch_on_every_rank(tmp_path: Path) -> None:
    ranks = [Rank(samples=[0, 1, 2, 0], loss=1.9), Rank(samples=[3, 0, 1, 2], loss=1.9)]
    assert name_cause(tmp_path, ranks, Rank(samples=range(4))) == "padded last batch"


@pytest.mark.parametrize(
    ("layers", "cause"),
    [
        (("BatchNorm2d", "Dropout", "Linear"), "batch norm per rank"),
        (("Dropout", "Linear"), "dropout per rank"),
        (("SyncBatchNorm", "Linear"), None),
    ],
)
def test_layers_are_the_cause_only_if_the_ranks_read_the_same_data(
    tmp_path: Path, layers: tuple[str, ...], cause: str | None
) -> None:
    ranks = [Rank(samples=half, gradient=1.1, layers=layers) for half in HALVES]
    assert name_cause(tmp_path, ranks, Rank(samples=ONE, layers=layers)) == cause


def test_the_loss_of_the_whole_batch_is_the_mean_weighted_by_rows(tmp_path: Path) -> None:
    [alone] = record(tmp_path / "one", [Rank(samples=ONE, loss=2.0)])
    ranks = [Rank(samples=range(9), loss=1.0), Rank(samples=range(9, 12), loss=5.0)]
    assert not compare(alone, combine_losses(record(tmp_path / "many", ranks)), [alone]).findings


def test_copies_of_one_training_are_found_though_nothing_differs(tmp_path: Path) -> None:
    [alone] = record(tmp_path / "one", [Rank(samples=ONE)])
    copies = record(tmp_path / "copies", [Rank(samples=ONE)] * 2)
    halves = record(tmp_path / "halves", [Rank(samples=half) for half in HALVES])
    assert not compare(alone, combine_losses(copies), [alone]).findings
    cause = find_undivided(alone, copies)
    assert cause is not None
    assert cause.name == "undivided data"
    assert find_undivided(alone, halves) is None
    assert find_undivided(alone, record(tmp_path / "solo", [Rank(samples=ONE)])) is None
