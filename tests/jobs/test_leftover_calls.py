"""Calls of the old training loop beside a job raise with the line to delete; calls that are right do not."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.jobs import DEADLINE_SECONDS
from support.processes import on_mesh
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from rankless.context.world import World
from rankless.errors import RanklessError, StepError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

MARK = "# the line"


class Loop:
    """A script's model, optimizer, scaler and jobs, for functions that hold the body of its loop."""

    def __init__(self, mesh=None, **options):
        torch.manual_seed(1)
        world = World(mesh=mesh or Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        make = {"model": self.model, "view": None, "world": lambda: world}
        self.train = make_job(self.loss, optimizer=self.optimizer, step_options=StepOptions(**options), **make)
        self.predict = make_job(self.loss, optimizer=None, **make)

    def loss(self, features, labels):
        return F.cross_entropy(self.model(features), labels)


def steps_again(loop):
    loop.train(*loop.batch)
    loop.optimizer.step()  # the line


def clears_before_and_steps_again(loop):
    loop.optimizer.zero_grad()
    loop.train(*loop.batch)
    loop.optimizer.step()  # the line


def evaluates_and_steps_again(loop):
    loop.train(*loop.batch)
    loop.predict(*loop.batch)
    loop.optimizer.step()  # the line


def adds_a_penalty_and_steps_again(loop):
    loss = loop.train(*loop.batch) + loop.model.weight.norm()
    loss.backward()
    loop.optimizer.step()  # the line


def steps_every_other_call(loop):
    for number in range(4):
        loop.train(*loop.batch)
        if number % 2:
            loop.optimizer.step()  # the line


def computes_gradients_again(loop):
    loss = loop.train(*loop.batch)
    loss.backward()  # the line


def computes_gradients_of_a_part(loop):
    loss = loop.train(*loop.batch)
    (loss.mean() / 4).backward()  # the line


def computes_gradients_by_autograd(loop):
    torch.autograd.backward([loop.train(*loop.batch)])  # the line


def computes_gradients_after_evaluation(loop):
    loss = loop.train(*loop.batch)
    loop.predict(*loop.batch)
    loss.backward()  # the line


def scales_the_loss(loop):
    loop.scaler.scale(loop.train(*loop.batch)).backward()  # the line


def unscales(loop):
    loop.scaler.scale(loop.train(*loop.batch))
    loop.scaler.unscale_(loop.optimizer)  # the line


def steps_by_the_scaler(loop):
    loop.scaler.scale(loop.train(*loop.batch))
    loop.scaler.step(loop.optimizer)  # the line


def steps_by_a_scaler_that_is_off(loop):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop.train(*loop.batch)
    scaler.step(loop.optimizer)  # the line


def updates_the_scaler(loop):
    loop.train(*loop.batch)
    loop.scaler.update()  # the line


def clips_the_norm(loop):
    loop.train(*loop.batch)
    clip_grad_norm_(loop.model.parameters(), 1.0)  # the line


def clips_values(loop):
    loop.train(*loop.batch)
    clip_grad_value_(loop.model.parameters(), 0.5)  # the line


def clips_one_parameter(loop):
    loop.train(*loop.batch)
    nn.utils.clip_grad_norm_(loop.model.weight, max_norm=1)  # the line


def clips_with_a_known_norm(loop):
    loop.train(*loop.batch)
    norm = get_total_norm([item.grad for item in loop.model.parameters()])
    nn.utils.clip_grads_with_norm_(loop.model.parameters(), 1.0, norm)  # the line


def predicts_and_computes_gradients(loop):
    loop.predict(*loop.batch).backward()  # the line


LEFTOVERS = {
    steps_again: "optimizer.step() after the call",
    clears_before_and_steps_again: "optimizer.step() after the call",
    evaluates_and_steps_again: "optimizer.step() after the call",
    adds_a_penalty_and_steps_again: "optimizer.step() after the call",
    steps_every_other_call: "optimizer.step() after the call",
    computes_gradients_again: "a tensor without gradients, after a call of job 'loss'",
    computes_gradients_of_a_part: "a tensor without gradients, after a call of job 'loss'",
    computes_gradients_by_autograd: "a tensor without gradients, after a call of job 'loss'",
    computes_gradients_after_evaluation: "a tensor without gradients, after a call of job 'loss'",
    scales_the_loss: "a tensor without gradients, after a call of job 'loss'",
    unscales: "a call of a GradScaler",
    steps_by_the_scaler: "a call of a GradScaler",
    steps_by_a_scaler_that_is_off: "a call of a GradScaler",
    updates_the_scaler: "a call of a GradScaler",
    clips_the_norm: "gradients clipped after the call",
    clips_values: "gradients clipped after the call",
    clips_one_parameter: "gradients clipped after the call",
    clips_with_a_known_norm: "gradients clipped after the call",
    predicts_and_computes_gradients: "a tensor without gradients, after a call of job 'loss'",
}
FIXES = {
    clips_the_norm: "pass clip_norm=1 to rankless.job",
    clips_values: "pass clip_value=0.5 to rankless.job",
    predicts_and_computes_gradients: "pass optimizer= to rankless.job",
    steps_again: "delete this line",
}


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    (offset,) = (number for number, text in enumerate(lines) if MARK in text)
    return f"{display_name(__file__)}:{first + offset}"


def found_in(mesh, body):
    """Return what the error of a loop's body says."""
    with pytest.raises(RanklessError) as raised:
        body(Loop(mesh))
    assert isinstance(raised.value, StepError)
    return str(raised.value.found), raised.value.fix, raised.value.where


@pytest.mark.parametrize(("body", "found"), LEFTOVERS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_a_leftover_call_raises_with_its_line_and_what_to_do(body, found):
    text, fix, where = found_in(Mesh.solo(), body)
    assert found in text
    assert FIXES.get(body, "delete") in fix
    assert where == line_of(body)


@pytest.mark.slow
@pytest.mark.parametrize("body", [steps_again, clips_values, computes_gradients_again], ids=lambda body: body.__name__)
def test_on_two_workers_the_same_leftover_call_raises(body):
    for text, _fix, where in on_mesh(2, found_in, body):
        assert LEFTOVERS[body] in text
        assert where == line_of(body)


def clears_and_measures(loop):
    loss = loop.train(*loop.batch)
    norm = clip_grad_norm_(loop.model.parameters(), float("inf"))
    assert norm == get_total_norm([item.grad for item in loop.model.parameters()])
    loop.optimizer.zero_grad()
    loop.optimizer.step()
    assert loss > 0


def trains_on_by_itself(loop):
    loop.train(*loop.batch)
    loop.optimizer.zero_grad()
    loop.loss(*loop.batch).backward()
    clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.optimizer.step()


def trains_on_after_clearing_in_place(loop):
    loop.train(*loop.batch)
    loop.optimizer.zero_grad(set_to_none=False)
    loop.loss(*loop.batch).backward()
    clip_grad_value_(loop.model.parameters(), 1.0)
    loop.optimizer.step()


def steps_with_gradients_from_autograd(loop):
    loop.train(*loop.batch)
    gradients = torch.autograd.grad(loop.loss(*loop.batch), list(loop.model.parameters()))
    for parameter, gradient in zip(loop.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    loop.optimizer.step()


def steps_with_a_closure(loop):
    def closure():
        loop.optimizer.zero_grad()
        loss = loop.loss(*loop.batch)
        loss.backward()
        return loss

    loop.train(*loop.batch)
    loop.optimizer.step(closure)


def trains_another_model(loop):
    other = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(other.parameters())
    for _ in range(2):
        loop.train(*loop.batch)
        optimizer.zero_grad()
        other(loop.batch[0]).sum().backward()
        clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()


def steps_another_optimizer_with_the_jobs_gradients(loop):
    second = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    loop.train(*loop.batch)
    second.step()


def clips_and_steps_what_the_job_does_not(loop):
    other = nn.Linear(3, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    train = make_job(
        lambda features, labels: F.cross_entropy(loop.model(features) + other(features), labels),
        model=[loop.model, other],
        optimizer=loop.optimizer,
        view=None,
        world=lambda: world,
    )
    train(*loop.batch)
    clip_grad_norm_(other.parameters(), 1.0)
    second.step()


def trains_by_itself_first(loop):
    loop.optimizer.zero_grad()
    loop.loss(*loop.batch).backward()
    clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.optimizer.step()
    loop.train(*loop.batch)


def steps_a_scheduler_and_an_average(loop):
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for _ in range(2):
        loop.train(*loop.batch)
        scheduler.step()
        average.update_parameters(loop.model)


def copies_the_optimizer(loop):
    loop.train(*loop.batch)
    copied = copy.deepcopy(loop.optimizer)
    copied.step()


def scales_a_loss_of_its_own(loop):
    loop.train(*loop.batch)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(*loop.batch)).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


RIGHT = [
    clears_and_measures,
    trains_on_by_itself,
    trains_on_after_clearing_in_place,
    steps_with_gradients_from_autograd,
    steps_with_a_closure,
    trains_another_model,
    steps_another_optimizer_with_the_jobs_gradients,
    clips_and_steps_what_the_job_does_not,
    trains_by_itself_first,
    steps_a_scheduler_and_an_average,
    copies_the_optimizer,
    scales_a_loss_of_its_own,
]


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.__name__)
def test_a_call_of_the_scripts_own_is_left_alone(body):
    loop = Loop()
    for _ in range(2):
        body(loop)


def test_a_step_between_accumulated_calls_raises():
    loop = Loop(accumulate=3)
    loop.train(*loop.batch)
    with pytest.raises(StepError, match="with the gradients that the job has used"):
        loop.optimizer.step()


def test_clearing_between_accumulated_calls_is_harmless_or_raises():
    loop, plain = Loop(accumulate=2), Loop(accumulate=2)
    for _ in range(2):
        loop.train(*loop.batch)
        loop.optimizer.zero_grad()
        plain.train(*plain.batch)
    assert torch.equal(loop.model.weight, plain.model.weight)
    loop.train(*loop.batch)
    loop.optimizer.zero_grad(set_to_none=False)
    with pytest.raises(StepError, match=r"delete zero_grad\(set_to_none=False\)"):
        loop.train(*loop.batch)


def test_an_error_of_pytorch_stays_in_a_script_without_jobs():
    # In a process of its own: a job of another test may still live in this one.
    script = "import rankless, torch; torch.zeros(()).backward()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert ended.stderr.splitlines()[-1].startswith("RuntimeError: element 0 of tensors does not require grad")
