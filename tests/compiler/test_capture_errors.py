"""Errors for jobs that cannot be one program; errors of the script itself pass unchanged."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from adversarial_cases import perceptron, rows
from support.devices import DEVICE, get_random_state

from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.arguments import flatten_arguments
from rankless.jobs.job import make_job
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name


def call_captured(function, model, *arguments):
    """Return the result of the captured train job for a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = World(mesh=Mesh.solo(DEVICE), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(function, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    return ConsistentView(job.definition, world).run(flatten_arguments(arguments, {}, torch.device("cpu")))


def test_an_error_raised_by_the_script_passes_unchanged():
    def loss(features, labels):
        raise RuntimeError(f"no model for {tuple(features.shape)} and {tuple(labels.shape)}")

    with pytest.raises(RuntimeError, match=r"^no model for \(5, 6\) and \(5,\)$"):
        call_captured(loss, perceptron(), *rows())


def test_an_error_of_pytorch_about_shapes_passes_unchanged():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features.t()), labels)

    with pytest.raises(RuntimeError, match="same reduction dim") as raised:
        call_captured(loss, model, *rows())
    assert not isinstance(raised.value, CaptureError)


def test_garbage_collection_callbacks_do_not_count_as_code_of_the_job():
    model = perceptron()
    seen = []

    def loss(features, labels):
        rounds = [[number] for number in range(200)]
        return F.cross_entropy(model(features), labels) * len(rounds)

    def collected(phase, _info):
        seen.append(phase)

    before = gc.get_threshold()
    # The callback runs at a different moment in each pass, as with libraries that hook the collector (hypothesis).
    gc.callbacks.append(lambda phase, info: collected(phase, info) if len(seen) % 3 else seen.append(phase))
    gc.set_threshold(37)
    try:
        call_captured(loss, model, *rows())
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert seen


def no_loss(_model, _features, _labels):
    return None


def count(model, features, labels):
    return (model(features).argmax(1) == labels).sum()


def detached(model, features, labels):
    return F.cross_entropy(model(features), labels).detach()


def empty(_model, _features, _labels):
    return ()


def dictionary_without_loss(model, features, labels):
    return {"error": F.cross_entropy(model(features), labels)}


NOT_A_LOSS = {
    no_loss: "a value of type NoneType",
    count: "a int64 tensor of shape [], without gradient",
    detached: "a float64 tensor of shape [], without gradient",
    empty: "a value of type NoneType",
    dictionary_without_loss: "a value of type NoneType",
}


@pytest.mark.parametrize(("function", "found"), NOT_A_LOSS.items(), ids=lambda item: getattr(item, "__name__", None))
def test_a_train_job_without_a_loss_raises_an_error_with_what_it_returned(function, found):
    model = perceptron()

    def loss(features, labels):
        return function(model, features, labels)

    with pytest.raises(CaptureError) as raised:
        call_captured(loss, model, *rows())
    assert raised.value.found == found
    assert "train job 'loss' to return its loss" in str(raised.value.expected)
    assert raised.value.where == f"{display_name(__file__)}:{loss.__code__.co_firstlineno}"


def test_an_argument_that_cannot_be_part_of_a_cache_key_is_refused_by_its_type():
    model = perceptron()

    def loss(features, labels, seen):
        return F.cross_entropy(model(features), labels) + len(seen)

    with pytest.raises(CaptureError) as raised:
        call_captured(loss, model, *rows(), {1, 2})
    assert raised.value.found == "arguments of type set"


def test_a_refused_job_does_not_change_parameters_or_the_generator():
    torch.manual_seed(3)
    model, batch = perceptron(), rows()
    before, generator = [item.detach().clone() for item in model.parameters()], get_random_state()

    def loss(features, labels):
        scores = model(F.dropout(features, 0.5))
        return F.cross_entropy(torch.from_numpy(scores.detach().numpy()), labels)

    with pytest.raises(CaptureError):
        call_captured(loss, model, *batch)
    assert torch.equal(get_random_state(), generator)
    for item, wanted in zip(model.parameters(), before, strict=True):
        assert torch.equal(item, wanted)
        assert item.grad is None


class Interrupted(torch.autograd.Function):
    """An operator whose backward pass an interrupt ends."""

    @staticmethod
    def forward(_context, values):
        return values.clone()

    @staticmethod
    def backward(_context, _gradient):
        raise KeyboardInterrupt


def test_an_interrupt_during_capture_gives_no_warning_about_the_backward_pass():
    model = perceptron()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            call_captured(lambda x, y: F.cross_entropy(Interrupted.apply(model(x)), y), model, *rows())
    assert not [warning for warning in seen if "Error detected" in str(warning.message)]
