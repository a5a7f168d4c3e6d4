"""Adversarial cases with values that change between calls: process state, evaluated text, arguments, a trainer."""

import contextvars
import functools
import os
import queue
import sys
import threading
import weakref

import stale_settings
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from adversarial_stale_objects import Holder
from adversarial_stale_values import scaled_by


def referent_of_a_weak_reference():
    holder = Holder()
    reference = weakref.ref(holder)

    def change(number):
        holder.scale = number + 1.0

    return scaled_by(lambda: reference().scale, change)


def value_of_a_thread():
    local = threading.local()
    local.scale = 1.0

    def change(number):
        local.scale = number + 1.0

    return scaled_by(lambda: local.scale, change)


def context_variable():
    variable = contextvars.ContextVar("scale", default=1.0)
    return scaled_by(lambda: variable.get(), lambda number: variable.set(number + 1.0) and None)


def environment_variable():
    def change(number):
        os.environ["RANKLESS_TESTS_SCALE"] = str(number + 1.0)

    return scaled_by(lambda: float(os.environ["RANKLESS_TESTS_SCALE"]), change)


def environment_variable_that_appears():
    def change(number):
        os.environ.pop("RANKLESS_TESTS_OTHER", None)
        if number:
            os.environ["RANKLESS_TESTS_OTHER"] = str(number + 1.0)

    return scaled_by(lambda: float(os.getenv("RANKLESS_TESTS_OTHER", "5.0")), change)


def command_line():
    def change(number):
        sys.argv[1:] = ["word"] * number

    return scaled_by(lambda: len(sys.argv), change)


def cached_function():
    scale = 1.0

    @functools.lru_cache
    def read():
        return scale

    def change(number):
        nonlocal scale
        scale = number + 1.0
        if number == 2:
            read.cache_clear()

    return scaled_by(read, change)


def evaluated_text():
    settings = {"text": "1.0"}
    return scaled_by(lambda: eval(settings["text"]), lambda number: settings.update(text=f"{number} + 1.0"))


def text_that_names_a_global():
    def change(number):
        stale_settings.scale = number + 1.0

    return scaled_by(lambda: eval("stale_settings." + "scale"), change)


def argument_that_is_an_object():
    model, holder = perceptron(), Holder()

    def loss(features, labels, given):
        return F.cross_entropy(model(features), labels) * given.scale

    def change(number):
        holder.scale = number + 1.0

    given = [(*batch, holder) for batch in batches()]
    return Script(function=loss, modules={"model": model}, batches=given, before_call=change)


def arguments_that_compare_equal():
    model = perceptron()

    def loss(features, labels, given):
        return F.cross_entropy(model(features), labels) * (2.0 if isinstance(given, float) else 1.0)

    given = [(*batch, value) for batch, value in zip(batches(), (1, 1.0, True), strict=True)]
    return Script(function=loss, modules={"model": model}, batches=given)


class Trainer:
    """A script as a class: the job is a method that does not read most of its attributes."""

    def __init__(self):
        self.model = perceptron()
        self.coefficient = 1.0
        self.epoch = 0
        self.history = []

    def objective(self, features, labels):
        return F.cross_entropy(self.model(features), labels) * self.coefficient

    def advance(self, number):
        self.epoch += 1
        self.history.append(number)
        self.coefficient = 1.0 / (number + 1)


def annealed_coefficient_of_a_trainer():
    trainer = Trainer()
    modules = {"model": trainer.model}
    return Script(function=trainer.objective, modules=modules, batches=batches(), before_call=trainer.advance)


def queue_that_is_looked_into():
    waiting = queue.Queue()
    return scaled_by(lambda: waiting.qsize() + 1.0, waiting.put)


SUPPORTED = [
    *(referent_of_a_weak_reference, value_of_a_thread, context_variable, environment_variable),
    *(environment_variable_that_appears, command_line, cached_function, evaluated_text),
    *(text_that_names_a_global, argument_that_is_an_object, arguments_that_compare_equal),
    *(annealed_coefficient_of_a_trainer, queue_that_is_looked_into),
]
CASES = [AdversarialCase(build=build) for build in SUPPORTED]
