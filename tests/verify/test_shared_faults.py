"""Faults that the runs on one worker could share with the run on several, so that no comparison of them would show."""

from pathlib import Path

import pytest
import torch
from support.verify_output import read_verdict, report_on
from support.warm_runs import rankless
from torch import nn

from rankless.jobs.last_bit_perturbation import perturbed_parameters
from rankless.verify.differences_beyond_tolerance import compare
from rankless.verify.read_and_combine_recordings import Recording, read_recordings
from rankless.verify.recording.run_recorder import RunRecorder

READING = """
import torch
import rankless
from rankless.data.{module} import {name}

original = {name}.{method}

def wrong(self, *arguments):
    {fault}

{name}.{method} = wrong

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.tensor(float(index % 5))

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, targets):
    return (model(inputs).squeeze(1) - targets).square().mean()

data = {data}
for batch in rankless.loader(data, batch_size=8, shuffle=True, seed=0):
    train(*batch)
"""
ROWS = "Rows()"
TENSORS = "torch.utils.data.TensorDataset(torch.arange(72.0).reshape(24, 3), torch.arange(24.0))"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "method", "fault", "data"),
    [
        ("sample_reader", "SampleReader", "_read_one", "return original(self, arguments[0] // 2, arguments[1])", ROWS),
        pytest.param(
            "collation",
            "Collation",
            "__call__",
            "read = original(self, *arguments); read.data[0][-1] = 0; return read",
            TENSORS,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_fault_of_the_loader_in_all_runs_is_found(
    module: str, name: str, method: str, fault: str, data: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(READING.format(module=module, name=name, method=method, fault=fault, data=data))
    job = rankless("verify", "-n", "2", "--devices", "cpu", "train.py", folder=tmp_path)
    assert job.returncode == 1, job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith("NOT the same training: first at step 1, result of train")


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.clamp_(-0.1, 0.1),
        lambda weight: setattr(weight, "data", weight.data.clamp(-0.1, 0.1)),
        lambda weight: weight.data.copy_(torch.full_like(weight, 0.05)),
        lambda weight: weight.data[0].zero_(),
    ],
)
def test_the_perturbed_run_keeps_what_the_script_writes_into_a_parameter(write) -> None:
    torch.manual_seed(0)
    plain, perturbed = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    perturbed.load_state_dict(plain.state_dict())
    write(plain.weight)
    with perturbed_parameters(perturbed.parameters(), torch.Generator().manual_seed(1)):
        write(perturbed.weight)
    assert torch.allclose(perturbed.weight, plain.weight, rtol=1e-15, atol=0)
    assert torch.equal(perturbed.bias, plain.bias) or not torch.equal(perturbed.weight, plain.weight)


def record(
    folder: Path, *, loss: float = 1.0, bias: float = 0.0, gradient: float = 0.0, decay: float = 0.0
) -> Recording:
    """Record two steps of a model whose weight gets 1 as gradient, and whose bias gets `gradient`."""
    recorder, model = RunRecorder(str(folder), 0), nn.Linear(1, 4, dtype=torch.float64)
    nn.init.ones_(model.weight).grad = torch.ones(4, 1, dtype=torch.float64)
    nn.init.ones_(model.bias).grad = torch.full((4,), gradient, dtype=torch.float64)
    recorder.register("model", model)
    for _step in range(2):
        with torch.no_grad():
            model.weight -= 0.01
            model.bias += bias - decay * model.bias
        recorder.record_call(job="train", line="train.py:7", results=torch.tensor(loss, dtype=torch.float64))
        recorder.record_step(job="train", model={"model": model})
    recorder.finish()
    [recording] = read_recordings(str(folder), 1)
    assert recording is not None
    return recording


def test_noise_as_large_as_the_fault_never_passes(tmp_path: Path) -> None:
    one, many = record(tmp_path / "one"), record(tmp_path / "many", loss=1.4)
    comparison = compare(one, [many], [record(tmp_path / "noise", loss=1.41)])
    report = report_on(comparison, workers=2)
    assert not comparison.findings
    assert (report.verdict, report.exit_code) == ("undecided", 3)
    assert report.text == ("could not be decided: at step 1 the noise in result of train (0.41 of 1) could hide faults")


def test_noise_decides_up_to_the_step_where_it_is_too_high(tmp_path: Path) -> None:
    one, many = record(tmp_path / "one"), record(tmp_path / "many", bias=1e-3)
    report = report_on(compare(one, [many], [record(tmp_path / "noise", bias=1e-2)]), workers=2)
    assert report.verdict == "undecided"
    assert "step 1 the noise in model.bias" in report.text


def test_noise_hides_nothing_where_values_are_equal_to_rounding(tmp_path: Path) -> None:
    one, many = record(tmp_path / "one"), record(tmp_path / "many", bias=1e-16)
    report = report_on(compare(one, [many], [record(tmp_path / "noise", bias=1e-2)]), workers=2)
    assert report.verdict == "same"


ROUNDING = 3e-17


def test_rounding_may_drive_a_parameter_in_any_direction(tmp_path: Path) -> None:
    one = record(tmp_path / "one", bias=1e-3, gradient=ROUNDING)
    noise = record(tmp_path / "noise", bias=-1e-3, gradient=-ROUNDING)
    report = report_on(compare(one, [record(tmp_path / "many", bias=-9e-4, gradient=ROUNDING)], [noise]), workers=2)
    assert report.verdict == "same", report.text


def test_a_lost_decay_is_found_though_the_gradient_is_rounding(tmp_path: Path) -> None:
    one = record(tmp_path / "one", gradient=ROUNDING, decay=1e-3)
    noise = record(tmp_path / "noise", gradient=-ROUNDING, decay=1e-3)
    report = report_on(compare(one, [record(tmp_path / "many", gradient=ROUNDING)], [noise]), workers=2)
    assert report.verdict == "different"
    assert report.first_difference is not None
    assert report.first_difference.tensor == "model.bias"


def test_gradients_that_are_mostly_rounding_decide_nothing(tmp_path: Path) -> None:
    def constant(folder: str, gradient: float) -> Recording:
        recorder, model = RunRecorder(str(tmp_path / folder), 0), nn.Linear(9, 1, dtype=torch.float64)
        nn.init.ones_(model.weight).grad = torch.full((1, 9), gradient, dtype=torch.float64)
        nn.init.ones_(model.bias).grad = torch.ones(1, dtype=torch.float64)
        recorder.register("model", model)
        recorder.record_call(job="train", line="", results=torch.tensor(1.0, dtype=torch.float64))
        recorder.record_step(job="train", model={"model": model})
        recorder.finish()
        [recording] = read_recordings(str(tmp_path / folder), 1)
        assert recording is not None
        return recording

    one = constant("one", ROUNDING)
    report = report_on(compare(one, [one], [constant("noise", -ROUNDING)]), workers=2)
    assert report.verdict == "undecided"
    assert "the gradients of most parameters are rounding errors only" in report.text
