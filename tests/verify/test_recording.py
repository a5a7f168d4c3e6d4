import math

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from rankless.jobs.last_bit_perturbation import perturb_gradients, perturbed_parameters
from rankless.records.verify_recording_format import (
    JobCalled,
    ModelRegistered,
    RecordingFinished,
    StepRecorded,
    read_results,
    results_file,
    tensors_file,
)
from rankless.verify.read_and_combine_recordings import to_array
from rankless.verify.recording.run_recorder import RunRecorder


def frames(folder, rank=0):
    return list(read_results(results_file(str(folder), rank)))


def sketch_of(tensor, folder):
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    recorder = RunRecorder(str(folder), 0)
    recorder.register("model", model)
    recorder.finish()
    return frames(folder)[0].tensors[0].value


def test_calls_steps_and_final_tensors_are_written_in_order(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    recorder = RunRecorder(str(tmp_path), 1)
    recorder.register("model", model)
    recorder.register("again", model)
    recorder.record_call(job="train", line="t.py:3", results={"loss": torch.tensor(0.5), "hits": 3})
    model[0].weight.grad = torch.ones(3, 2, dtype=torch.bfloat16)
    recorder.record_step(job="train", model={"model": model})
    recorder.record_call(job="predict", line="t.py:9", results=torch.tensor([True, False]))
    recorder.finish()
    recorder.finish()
    registered, train, step, predict, finished = frames(tmp_path, 1)
    assert isinstance(registered, ModelRegistered)
    assert isinstance(train, JobCalled)
    assert [(leaf.path, leaf.dtype) for leaf in train.leaves] == [("['loss']", "float32"), ("['hits']", "int64")]
    assert to_array(train.leaves[0]) == 0.5
    assert isinstance(step, StepRecorded)
    assert (step.step, step.job) == (1, "train")
    by_name = {state.name: state for state in step.tensors}
    assert set(by_name) == {
        *("model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"),
        *("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"),
    }
    assert by_name["model.0.weight"].gradient.norm == pytest.approx(math.sqrt(6))
    assert by_name["model.0.bias"].gradient is None
    assert isinstance(predict, JobCalled)
    assert (predict.call, predict.steps, predict.line) == (1, 1, "t.py:9")
    assert to_array(predict.leaves[0]).tolist() == [1, 0]
    assert isinstance(finished, RecordingFinished)
    tensors = safetensors.numpy.load_file(tensors_file(str(tmp_path), 1))
    expected = model[0].weight.detach().double().numpy()
    np.testing.assert_array_equal(tensors["model.0.weight"], expected)
    parameters = {final.name for final in finished.tensors if final.kind == "parameter"}
    assert len(parameters) == 4
    assert {final.dtype for final in finished.tensors} == {"bfloat16", "int64"}


def test_the_recording_of_a_killed_worker_is_readable(tmp_path):
    recorder = RunRecorder(str(tmp_path), 0)
    for call in range(3):
        recorder.record_call(job="train", line="", results=float(call))
    file = results_file(str(tmp_path), 0)
    whole = file.read_bytes()
    assert len(frames(tmp_path)) == 3
    file.write_bytes(whole[:-1])
    assert len(frames(tmp_path)) == 2
    file.write_bytes(whole + b"\x01")
    assert len(frames(tmp_path)) == 3


def test_sketches_estimate_the_distance_of_tensors(tmp_path):
    torch.manual_seed(0)
    tensor = torch.randn(5000, dtype=torch.float64)
    first = sketch_of(tensor, tmp_path / "a")
    assert first == sketch_of(tensor, tmp_path / "b")
    assert first.norm == pytest.approx(float(tensor.norm()))
    for size in (1e-10, 1e-3, 1.0):
        change = torch.randn(5000, dtype=torch.float64) * size
        second = sketch_of(tensor + change, tmp_path / "c")
        ratio = math.dist(first.sketch, second.sketch) / float(change.norm())
        assert 0.5 < ratio < 2
    one_changed = tensor.clone()
    one_changed[1234] += 0.25
    assert math.dist(first.sketch, sketch_of(one_changed, tmp_path / "d").sketch) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_perturbed_by_the_seed_in_their_last_bits(dtype):
    original = torch.linspace(-1, 1, 101).to(dtype)
    original[50] = 0
    changed, again = original.clone(), original.clone()
    perturb_gradients([changed], torch.Generator().manual_seed(1))
    perturb_gradients([again], torch.Generator().manual_seed(1))
    assert torch.equal(changed, again)
    assert not torch.equal(changed, original)
    assert (changed - original).abs().max() <= 2 * torch.finfo(dtype).eps
    assert changed[50] == 0
    perturb_gradients([torch.tensor([1, 2]), torch.empty(0)], torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_a_sketch_is_that_of_the_same_numbers_in_float64(dtype, tmp_path):
    numbers = (torch.arange(37.0) - 20).to(dtype)
    wide = numbers.to(torch.complex128) if dtype.is_complex else numbers.double()
    assert sketch_of(numbers, tmp_path / "a") == sketch_of(wide, tmp_path / "b")


def test_sparse_gradients_are_perturbed_and_recorded_like_dense_ones(tmp_path):
    def gradient_of(sparse: bool) -> torch.Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 3, sparse=sparse)
        (embedding(torch.tensor([4, 1, 4])) * torch.arange(9.0).reshape(3, 3)).sum().backward()
        return embedding.weight.grad

    sparse, dense = gradient_of(True), gradient_of(False)
    assert sparse.layout == torch.sparse_coo
    assert sketch_of(sparse, tmp_path / "a") == sketch_of(dense, tmp_path / "b")
    perturb_gradients([sparse], torch.Generator().manual_seed(1))
    difference = (sparse.to_dense() - dense).abs()
    assert 0 < difference.max() <= 2 * dense.abs().max() * torch.finfo(torch.float32).eps
    assert (difference[[0, 2, 3, 5]] == 0).all()


def test_parameters_are_perturbed_inside_and_restored_after():
    model = nn.Linear(50, 20)
    before = model.weight.detach().clone()
    inputs = torch.randn(4, 50)
    with perturbed_parameters(model.parameters(), torch.Generator().manual_seed(0)):
        within = model.weight.detach().clone()
        model(inputs).sum().backward()
    assert torch.equal(model.weight, before)
    assert not torch.equal(within, before)
    assert ((within - before) / before).abs().max() <= 2 * torch.finfo(torch.float32).eps
    assert model.weight.grad is not None


def test_a_parameter_of_two_models_is_restored_too():
    weight = nn.Parameter(torch.randn(50))
    before = weight.detach().clone()
    with perturbed_parameters([weight, weight], torch.Generator().manual_seed(0)):
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)


def test_two_models_of_one_name_are_recorded_separately(tmp_path):
    recorder = RunRecorder(str(tmp_path), 0)
    recorder.register("model", nn.Linear(1, 1))
    recorder.register("model", nn.Linear(2, 2))
    recorder.finish()
    assert [registered.model for registered in frames(tmp_path)[:2]] == ["model", "model#2"]
    assert "model#2.weight" in safetensors.numpy.load_file(tensors_file(str(tmp_path), 0))
