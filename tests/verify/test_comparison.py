import copy
from dataclasses import replace

import msgspec
import pytest
import torch
from support.verify_output import report_on
from torch import nn

from rankless.jobs.last_bit_perturbation import perturb_gradients, perturbed_parameters
from rankless.records.verify_recording_format import JobCalled
from rankless.verify.decision_report import render_table
from rankless.verify.differences import measure
from rankless.verify.differences_beyond_tolerance import compare
from rankless.verify.noise_floor import NoiseFloor
from rankless.verify.read_and_combine_recordings import read_recordings, take_beginning
from rankless.verify.recording.run_recorder import RunRecorder
from rankless.verify.run_and_decide import describe_doubt

ROWS, STEPS = 12, 6


class Model(nn.Module):
    """A model with a statistic; the gradient of its first bias is zero up to rounding."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(5, 8, dtype=dtype)
        self.second = nn.Linear(8, 3, dtype=dtype)
        self.register_buffer("mean", torch.zeros(8, dtype=dtype))
        self.register_buffer("steps", torch.tensor(0))


def train(folder, workers, *, fault="", noise_seed=None, dtype=torch.float32, adaptive=False, stop=STEPS):
    """Train on ranks simulated in one process: shards, reduced by hand, recorded by each rank."""
    torch.manual_seed(0)
    origin = Model(dtype)
    models = [copy.deepcopy(origin) for _ in range(workers)]
    make = torch.optim.Adam if adaptive else torch.optim.SGD
    rate = 0.05 * (workers if fault == "wrong learning rate" and workers > 1 else 1)
    optimizers = [make(model.parameters(), lr=rate) for model in models]
    data = torch.randn(STEPS + 2, ROWS, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    recorders = [RunRecorder(str(folder), rank) for rank in range(workers)]
    noise = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
    for recorder, model in zip(recorders, models, strict=True):
        recorder.register("model", model)
    for step in range(1, stop + 1 + (fault == "extra step")):
        batch = data[step + (fault == "skipped batch" and step >= 3)]
        if noise is None:
            losses = whole_step(models, batch, step, fault)
        else:
            with perturbed_parameters(models[0].parameters(), noise):
                losses = whole_step(models, batch, step, fault)
            perturb_gradients([item.grad for item in models[0].parameters()], noise)
        for rank, (recorder, model) in enumerate(zip(recorders, models, strict=True)):
            optimizers[rank].step()
            if fault == "ranks disagreeing" and rank == 1 and step == 4:
                model.first.weight.data[0, 0] += 1e-4
            results = {"loss": losses[rank], "hits": torch.tensor(step + 4 * (fault == "wrong hits" and step == 5))}
            if fault == "jumping result":
                results["bit"] = torch.tensor(float(step == 3 and workers > 1))
            if fault == "other shape" and step == 2:
                results["loss"] = results["loss"].reshape(1)
            if not (fault == "missing call" and step == 5 and rank == 1):
                recorder.record_call(job="train", line="train.py:7", results=results)
                recorder.record_step(job="train", model={"model": model})
    for rank, recorder in enumerate(recorders):
        if fault == "changed at the end" and rank == 1:
            models[rank].second.bias.data += 1e-3
        recorder.finish(stopped=stop < STEPS)
    return read_recordings(str(folder), workers)


def whole_step(models, batch, step, fault):
    """Return every rank's loss of the whole batch, and leave the summed gradients in all models."""
    workers = len(models)
    shards = batch.tensor_split(workers) if workers != 3 else batch.split([5, 4, 3])
    late = step >= 3
    keep = torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(step)) > 0.3
    hidden, start = [], 0
    for rank, (model, rows) in enumerate(zip(models, shards, strict=True)):
        model.zero_grad()
        mask = keep[start : start + len(rows)]
        if fault == "other seed on one rank" and rank == 1 and late:
            mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(99)) > 0.3
        start += len(rows)
        hidden.append((model.first(rows), mask))
    mean = sum(values.sum(dim=0) for values, _ in hidden) / ROWS
    parts = []
    for model, (values, mask) in zip(models, hidden, strict=True):
        with torch.no_grad():
            local = fault == "unsynchronized statistic" and late
            model.mean.lerp_(values.mean(dim=0) if local else mean, 0.1)
            model.steps += 1
        count = len(values) * workers if fault == "wrong count" and late else ROWS
        parts.append(model.second((values - mean).tanh() * mask).square().sum() / count)
    loss = sum(parts)
    loss.backward()
    for name in dict(models[0].named_parameters()):
        gradients = [model.get_parameter(name).grad for model in models]
        total = sum(gradients)
        for rank, model in enumerate(models):
            dropped = fault == "dropped reduction" or (fault == "one bias not reduced" and name == "second.bias")
            own = gradients[rank].clone() if dropped and late else total.clone()
            model.get_parameter(name).grad = own
    return [loss.detach()] * workers


def compare_runs(tmp_path, fault="", workers=2, **options):
    one = train(tmp_path / "one", 1, **options)[0]
    many = train(tmp_path / "many", workers, fault=fault, **options)
    noise = train(tmp_path / "noise", 1, noise_seed=5, **options)
    return compare(one, many, noise)


def verdict(tmp_path, fault="", workers=2, **options):
    """Return the report, in float64 if the script's own precision does not suffice, as `verify` does."""
    comparison = compare_runs(tmp_path / "own", fault, workers, **options)
    if comparison.needs_float64:
        comparison = compare_runs(tmp_path / "exact", fault, workers, **(options | {"dtype": torch.float64}))
    return report_on(comparison, workers=workers)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_correct_training_is_the_same(tmp_path, workers, dtype, adaptive):
    report = verdict(tmp_path, workers=workers, dtype=dtype, adaptive=adaptive)
    assert report.same, report.text
    assert report.steps == STEPS
    assert len(report.losses_one) == len(report.losses_many) == STEPS
    assert report.text.startswith("same training: 6 steps")


FAULTS = [
    ("dropped reduction", 3, "gradient of model."),
    ("one bias not reduced", 3, "gradient of model.second.bias"),
    ("wrong count", 3, "result ['loss'] of train"),
    ("other seed on one rank", 3, "result ['loss'] of train"),
    ("skipped batch", 3, "result ['loss'] of train"),
    ("unsynchronized statistic", 3, "model.mean"),
    ("wrong learning rate", 1, "model.first.weight"),
    ("extra step", 7, "the calls"),
    ("other shape", 2, "result ['loss'] of train"),
    ("ranks disagreeing", 4, "model.first.weight"),
    ("wrong hits", 5, "result ['hits'] of train"),
    ("missing call", 5, "result ['loss'] of train"),
    ("changed at the end", 6, "model.second.bias"),
]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("fault", "step", "tensor"), FAULTS, ids=[name for name, _, _ in FAULTS])
@pytest.mark.ci_sample(8)
def test_an_injected_fault_is_found_and_its_first_step_and_tensor_named(tmp_path, fault, step, tensor, adaptive):
    # Three workers with uneven shards: a wrong count per rank shows only if shards are uneven.
    report = verdict(tmp_path, fault, workers=3, adaptive=adaptive)
    assert not report.same
    assert report.first_difference.step == step
    assert tensor in report.first_difference.tensor
    assert report.text.startswith(f"NOT the same training: first at step {step}, ")


def test_diverging_ranks_are_found_though_each_is_within_the_noise(tmp_path):
    def record(folder, values):
        for rank, value in enumerate(values):
            recorder, model = RunRecorder(str(tmp_path / folder), rank), nn.Linear(2, 1)
            nn.init.ones_(model.weight).grad = torch.ones(1, 2)
            nn.init.ones_(model.bias)
            recorder.register("model", model)
            recorder.record_call(job="train", line="", results=torch.tensor(1.0))
            recorder.record_step(job="train", model={"model": model})
            recorder.record_call(job="predict", line="train.py:9", results=torch.tensor(value))
            recorder.finish()
        return read_recordings(str(tmp_path / folder), len(values))

    one, noise = record("one", [1.0])[0], record("noise", [1.5])
    assert not compare(one, record("agreeing", [1.1, 1.1]), noise).findings
    [finding] = compare(one, record("many", [1.1, 1.101]), noise).findings
    assert "rank 1 to agree with rank 0" in finding.expected
    assert finding.tensor == "result of predict"
    assert finding.location.step == 1


def test_a_script_that_is_not_repeatable_is_not_the_same(tmp_path):
    one = train(tmp_path / "one", 1)[0]
    other = train(tmp_path / "other", 1, fault="wrong count")
    shifted = Model(torch.float32)
    recorder = RunRecorder(str(tmp_path / "noise"), 0)
    recorder.register("model", shifted)
    recorder.finish()
    [noise] = read_recordings(str(tmp_path / "noise"), 1)
    report = report_on(compare(one, other, [noise]), workers=1)
    assert not report.same
    assert report.verdict == "undecided"
    assert report.text.startswith("could not be decided: the script on one worker does not repeat itself: ")
    assert "repeated" in report.first_difference.expected


def test_nan_is_a_difference_only_in_one_of_two_runs(tmp_path):
    def constant(folder, value):
        recorder = RunRecorder(str(tmp_path / folder), 0)
        recorder.record_call(job="predict", line="", results=torch.tensor([1.0, value]))
        recorder.finish()
        return read_recordings(str(tmp_path / folder), 1)

    nan, again, one = constant("a", float("nan")), constant("b", float("nan")), constant("c", 1.0)
    assert not compare(nan[0], again, nan).findings
    assert compare(nan[0], one, nan).findings
    assert compare(one[0], nan, one).findings


@pytest.mark.parametrize(
    ("fault", "needed"),
    [
        ("", False),
        ("skipped batch", True),
        ("dropped reduction", False),  # ranks diverge, which rounding cannot explain
        ("wrong hits", True),
        ("extra step", True),  # a script may decide by numbers that rounding changes
        ("other shape", False),
        ("ranks disagreeing", False),
        ("missing call", False),
    ],
)
def test_float64_decides_only_about_different_numbers(tmp_path, fault, needed):
    comparison = compare_runs(tmp_path, fault, workers=2)
    assert bool(comparison.findings) == bool(fault)
    assert comparison.precision == "float32"
    assert comparison.needs_float64 == needed
    assert not compare_runs(tmp_path / "exact", fault, workers=2, dtype=torch.float64).needs_float64


@pytest.mark.parametrize(("fault", "is_gross"), [("skipped batch", True), ("jumping result", False)])
def test_only_gradients_show_that_no_rounding_explains_a_difference(tmp_path, fault, is_gross):
    one = train(tmp_path / "one", 1, fault="" if is_gross else fault)[0]
    comparison = compare(one, train(tmp_path / "many", 2, fault=fault), [one])
    assert comparison.findings[0].is_gross == is_gross


@pytest.mark.parametrize(("noise", "needed"), [(1e-2, True), (1e-4, False)])
def test_float64_decides_if_the_noise_is_high(tmp_path, noise, needed):
    def constant(folder, loss):
        recorder, model = RunRecorder(str(tmp_path / folder), 0), nn.Linear(1, 1)
        nn.init.ones_(model.weight).grad = torch.ones(1, 1)
        nn.init.ones_(model.bias)
        recorder.register("model", model)
        recorder.record_call(job="train", line="", results=torch.tensor(loss))
        recorder.record_step(job="train", model={"model": model})
        recorder.finish()
        return read_recordings(str(tmp_path / folder), 1)

    [one], many = constant("one", 2.0), constant("many", 2.0)
    comparison = compare(one, many, constant("noise", 2.0 + 2.0 * noise))
    assert not comparison.findings
    assert comparison.needs_float64 == needed
    doubt = "in float32, at step 1 the noise in result of train (0.02 of 2) could hide faults"
    assert not needed or describe_doubt(comparison) == doubt


def test_a_gradient_of_rounding_errors_may_differ_by_a_hundred_errors(tmp_path):
    def constant(folder, error):
        recorder, model = RunRecorder(str(tmp_path / folder), 0), nn.Linear(1, 1, dtype=torch.float64)
        nn.init.ones_(model.weight).grad = torch.ones(1, 1, dtype=torch.float64)
        nn.init.ones_(model.bias).grad = torch.tensor([error], dtype=torch.float64)
        recorder.record_step(job="train", model={"model": model})
        recorder.finish()
        return read_recordings(str(tmp_path / folder), 1)

    [one] = constant("one", 0.0)
    assert not compare(one, constant("rounding", 99 * 2.0**-52), [one]).findings
    assert compare(one, constant("more", 101 * 2.0**-52), [one]).findings


@pytest.mark.parametrize(("noisy", "same"), [(100, False), (99, True)])
def test_an_integer_may_differ_only_if_noise_flips_it_too(tmp_path, noisy, same):
    def count(folder, value):
        recorder = RunRecorder(str(tmp_path / folder), 0)
        recorder.record_call(job="hits", line="", results=value)
        recorder.finish()
        return read_recordings(str(tmp_path / folder), 1)

    comparison = compare(count("one", 100)[0], count("many", 101), count("noise", noisy))
    assert (not comparison.findings) == same


def test_the_report_and_the_table_list_what_was_compare_runs(tmp_path):
    one = train(tmp_path / "one", 1)[0]
    comparison = compare(one, train(tmp_path / "many", 2), train(tmp_path / "noise", 1, noise_seed=5))
    table = render_table(comparison.rows)
    assert "gradients, each step" in table
    assert "ranks among each other" in table
    decoded = msgspec.to_builtins(report_on(comparison, workers=2))
    assert decoded["same"] is True
    assert decoded["steps"] == STEPS
    assert decoded["first_difference"] is None
    assert decoded["noise_floor"].keys() == {"loss", "parameter"}
    assert len(decoded["losses_many"]) == STEPS
    assert 0 <= decoded["largest_loss_difference"] < 1e-5
    assert 0 <= decoded["largest_parameter_difference"] < 1e-5


def test_a_tolerance_below_the_noise_is_unmet_even_if_losses_repeat(tmp_path):
    one = train(tmp_path / "one", 1)[0]
    many = train(tmp_path / "many", 3)
    noise = train(tmp_path / "noise", 1, noise_seed=5)[0]
    lucky = [
        call if isinstance(call, JobCalled) else other for call, other in zip(one.results, noise.results, strict=True)
    ]
    repeated = [replace(noise, results=tuple(lucky))]
    tight, loose = (compare(one, many, repeated, tolerance=bound) for bound in (1e-12, 1e-3))
    assert tight.findings
    assert tight.tolerance.unmet is not None
    assert not loose.findings
    assert loose.tolerance.unmet is None


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_shorter_noise_run_allows_nothing_that_a_whole_one_forbids(tmp_path, stop, adaptive):
    one = train(tmp_path / "one", 1, adaptive=adaptive)[0]
    whole = train(tmp_path / "whole", 1, noise_seed=5, adaptive=adaptive)[0]
    shorter = train(tmp_path / "shorter", 1, noise_seed=5, adaptive=adaptive, stop=stop)[0]
    floors = [NoiseFloor([measure(take_beginning(one, noise), noise)[0]]) for noise in (shorter, whole)]
    differences, _ = measure(one, train(tmp_path / "many", 2, adaptive=adaptive)[0])
    assert {item.kind for item in differences} == {"result", "gradient", "parameter", "final"}
    for item in differences:
        assert floors[0].limit(item) <= floors[1].limit(item), item


@pytest.mark.parametrize(
    "fault", ["wrong hits", "ranks disagreeing", "changed at the end", "skipped batch", "wrong count"]
)
def test_a_fault_after_the_end_of_the_noise_run_is_found(tmp_path, fault):
    one = train(tmp_path / "one", 1, dtype=torch.float64)[0]
    noise = train(tmp_path / "noise", 1, noise_seed=5, dtype=torch.float64, stop=2)
    right = compare(one, train(tmp_path / "right", 3, dtype=torch.float64), noise)
    assert report_on(right, workers=2).verdict == "same"
    assert (right.noise_steps, right.steps) == (2, STEPS)
    assert right.parameter_noise > 0
    found = compare(one, train(tmp_path / "wrong", 3, fault=fault, dtype=torch.float64), noise)
    report = report_on(found, workers=2)
    assert report.verdict == "different"
    assert report.first_difference.step > 2
