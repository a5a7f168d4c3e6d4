"""Adversarial cases with training calls or file writes in the job: all are refused, on one device too."""

import csv
import io

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def script_doing(act):
    """Return a script whose job also acts on its model, loss and optimizer."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        act(model, value, optimizer)
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def step_of_an_optimizer():
    def act(_model, _loss, optimizer):
        optimizer.step()  # the line

    return script_doing(act)


def step_of_a_scheduler():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(perceptron().parameters(), lr=0.1), 1)

    def act(_model, _loss, _optimizer):
        scheduler.step()  # the line

    return script_doing(act)


def loss_scaled():
    scaler = torch.amp.GradScaler("cpu")

    def act(_model, loss, _optimizer):
        scaler.scale(loss)  # the line

    return script_doing(act)


def norm_clipped():
    def act(model, _loss, _optimizer):
        clip_grad_norm_(model.parameters(), 1.0)  # the line

    return script_doing(act)


def values_clipped():
    def act(model, _loss, _optimizer):
        clip_grad_value_(model.parameters(), 1.0)  # the line

    return script_doing(act)


def backward_of_the_loss():
    def act(_model, loss, _optimizer):
        loss.backward()  # the line

    return script_doing(act)


def line_written():
    file = io.StringIO()

    def act(_model, _loss, _optimizer):
        file.write("a step")  # the line

    return script_doing(act)


def row_written():
    writer = csv.writer(io.StringIO())

    def act(_model, _loss, _optimizer):
        writer.writerow(["a step"])  # the line

    return script_doing(act)


TRAINING_CALLS = [
    AdversarialCase(build=step_of_an_optimizer, refused=r"an optimizer's step\(\) inside the job"),
    AdversarialCase(build=step_of_a_scheduler, refused=r"a scheduler's step\(\) inside the job"),
    AdversarialCase(build=loss_scaled, refused=r"a GradScaler's scale\(\) inside the job"),
    AdversarialCase(build=norm_clipped, refused=r"clipping gradients inside the job"),
    AdversarialCase(build=values_clipped, refused=r"clipping gradients inside the job"),
    AdversarialCase(build=backward_of_the_loss, refused=r"backward\(\) inside the job"),
]
FILE_WRITES = [
    AdversarialCase(build=line_written, refused=r"write\(\) of a file inside the job"),
    AdversarialCase(build=row_written, refused=r"writerow\(\) of a file inside the job"),
]
