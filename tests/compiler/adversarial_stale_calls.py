"""Adversarial cases with impure calls, and with iterators, counters or files that advance: all are refused."""

import datetime
import io
import itertools
import os
import pathlib
import queue
import random
import secrets
import sqlite3
import subprocess
import sys
import time
import uuid
from random import random as draw
from time import perf_counter as clock

import numpy
import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn

CALLS = 0


def script(loss, model):
    return Script(function=loss, modules={"model": model}, batches=batches())


def count_that_is_taken_from():
    model, numbers = perceptron(), itertools.count()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * next(numbers)

    return script(loss, model)


def generator_that_is_taken_from():
    model = perceptron()

    def endless():
        number = 0
        while True:
            yield number
            number += 1

    numbers = endless()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * next(numbers)

    return script(loss, model)


def iterator_of_a_cycle_of_equal_values():
    model, numbers = perceptron(), itertools.cycle([1.0, 1.0, 1.0, 1.0, 2.0])

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * next(numbers)

    return script(loss, model)


def queue_that_is_taken_from():
    model, waiting = perceptron(), queue.Queue()
    for number in range(20):
        waiting.put(number)

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * waiting.get_nowait()

    return script(loss, model)


class Counter:
    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


def iterator_of_the_scripts_own():
    model, numbers = perceptron(), Counter()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * next(numbers)

    return script(loss, model)


def counter_in_an_object_in_a_list():
    model, counters = perceptron(), [Counter()]

    def loss(features, labels):  # the line
        counters[0].number += 1
        return F.cross_entropy(model(features), labels) * counters[0].number

    return script(loss, model)


def global_counter():
    model = perceptron()

    def loss(features, labels):  # the line
        global CALLS
        CALLS += 1
        return F.cross_entropy(model(features), labels) * CALLS

    return script(loss, model)


def counter_that_a_hook_keeps():
    model, calls = perceptron(), []
    model[0].register_forward_hook(lambda *_: calls.append(None))

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return script(loss, model)


def own_random_numbers():
    model, numbers = perceptron(), random.Random(3)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * numbers.uniform(1, 2)  # the line

    return script(loss, model)


def random_number_imported_by_name():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * draw()  # the line

    return script(loss, model)


def clock_imported_by_name():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * clock()  # the line

    return script(loss, model)


def generator_of_numpy():
    model, numbers = perceptron(), numpy.random.default_rng(3)

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * numbers.uniform(1, 2)

    return script(loss, model)


def generator_of_numpy_behind_a_method():
    model, draw_number = perceptron(), numpy.random.default_rng(3).random

    def loss(features, labels):  # the line
        value = F.cross_entropy(model(features), labels)
        return value * draw_number()

    return script(loss, model)


def random_number_of_a_database():
    model, database = perceptron(), sqlite3.connect(":memory:")

    def loss(features, labels):
        (number,) = database.execute("select random()").fetchone()
        value = F.cross_entropy(model(features), labels)
        return value * (number / 2**63)  # the line

    return script(loss, model)


def generator_of_numpy_made_inside():
    model = perceptron()

    def loss(features, labels):
        numbers = numpy.random.default_rng()  # the line
        return F.cross_entropy(model(features), labels) * numbers.random()

    return script(loss, model)


def script_calling(function, model=None):
    """Return a script whose job calls a function; the mark is on the line of the function."""
    model = perceptron() if model is None else model

    def loss(features, labels):
        function()
        return F.cross_entropy(model(features), labels)

    return script(loss, model)


def date_and_time():
    return script_calling(lambda: datetime.datetime.now())  # the line


def date_of_today():
    return script_calling(lambda: datetime.date.today())  # the line


def token():
    return script_calling(lambda: secrets.token_hex())  # the line


def identifier():
    return script_calling(lambda: uuid.uuid4())  # the line


def random_bytes():
    return script_calling(lambda: os.urandom(3))  # the line


def working_folder():
    return script_calling(lambda: os.getcwd())  # the line


def file_opened():
    return script_calling(lambda: open(__file__).close())  # the line


def file_read_by_its_path():
    return script_calling(lambda: pathlib.Path(__file__).read_text())  # the line


def file_that_may_exist():
    return script_calling(lambda: os.path.exists("stop"))  # the line


def file_of_arrays():
    return script_calling(lambda: numpy.load("scales.npy"))  # the line


def file_of_tensors():
    return script_calling(lambda: torch.load("scales.pt"))  # the line


def seed_of_torch():
    return script_calling(lambda: torch.initial_seed())  # the line


def seed_drawn():
    model = perceptron()

    def loss(features, labels):
        torch.seed()  # the line
        return F.cross_entropy(model(features), labels)

    return script(loss, model)


def answer_of_the_user():
    return script_calling(lambda: input())  # the line


def command_of_the_system():
    return script_calling(lambda: subprocess.run([sys.executable, "-V"], check=True))  # the line


def time_of_a_file_in_a_function_of_a_hook():
    model = perceptron()
    model[0].register_forward_hook(lambda *_: time.monotonic() and None)  # the line
    return script_calling(lambda: None, model)


def file_that_is_read_on():
    model, file = perceptron(), io.StringIO("1\n2\n3\n4\n5\n6\n7\n8\n9\n")

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * float(file.readline())

    return script(loss, model)


def lazy_layer():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)).double()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return script(loss, model)


def training_without_gradients():
    model = perceptron()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    change = lambda number: torch.set_grad_enabled(number != 1)  # noqa: E731 - as scripts have it
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


ADVANCED = r"would advance only once"
CALLED = r"the job calls "

CASES = [
    AdversarialCase(
        build=count_that_is_taken_from, refused=r"reads numbers, an iterator \(count\), which would advance only once"
    ),
    AdversarialCase(build=generator_that_is_taken_from, refused=ADVANCED),
    AdversarialCase(build=iterator_of_a_cycle_of_equal_values, refused=ADVANCED),
    AdversarialCase(
        build=queue_that_is_taken_from, refused=r"waiting.queue was of length \d+ and is of length \d+ after the job"
    ),
    AdversarialCase(build=iterator_of_the_scripts_own, refused=r"\.number was \d and is \d after the job"),
    AdversarialCase(
        build=counter_in_an_object_in_a_list, refused=r"counters\[0\]\.number was \d and is \d after the job"
    ),
    AdversarialCase(build=global_counter, refused=r"CALLS was \d and is \d after the job"),
    AdversarialCase(build=counter_that_a_hook_keeps, refused=r"calls was \[None\] and is \[None, None\] after the job"),
    AdversarialCase(build=own_random_numbers, refused=CALLED + r"random\.uniform;"),
    AdversarialCase(build=random_number_imported_by_name, refused=CALLED + r"random\.random;"),
    AdversarialCase(build=clock_imported_by_name, refused=CALLED + r"time\.perf_counter;"),
    AdversarialCase(build=generator_of_numpy, refused=r"numbers was '\w+' and is '\w+' after the job"),
    AdversarialCase(
        build=generator_of_numpy_behind_a_method, refused=r"draw_number was '\w+' and is '\w+' after the job"
    ),
    AdversarialCase(build=random_number_of_a_database, refused=r"mul.*, where the previous pass had mul"),
    AdversarialCase(build=generator_of_numpy_made_inside, refused=CALLED),
    AdversarialCase(build=date_and_time, refused=CALLED + r"datetime\.datetime\.now;"),
    AdversarialCase(build=date_of_today, refused=CALLED + r"datetime\.date\.today;"),
    AdversarialCase(build=token, refused=CALLED + r"secrets\.token_hex;"),
    AdversarialCase(build=identifier, refused=CALLED + r"uuid\.uuid4;"),
    AdversarialCase(build=random_bytes, refused=CALLED + r"posix\.urandom;"),
    AdversarialCase(build=working_folder, refused=CALLED + r"posix\.getcwd;"),
    AdversarialCase(build=file_opened, refused=CALLED + r"io\.open;"),
    AdversarialCase(build=file_read_by_its_path, refused=CALLED + r"pathlib\.read_text;"),
    AdversarialCase(build=file_that_may_exist, refused=CALLED + r"genericpath\.exists;"),
    AdversarialCase(build=file_of_arrays, refused=CALLED),
    AdversarialCase(build=file_of_tensors, refused=CALLED + r"torch\.load;"),
    AdversarialCase(build=seed_of_torch, refused=CALLED + r"torch\.initial_seed;"),
    AdversarialCase(build=seed_drawn, refused=r"reads or sets the state of a generator"),
    AdversarialCase(build=answer_of_the_user, refused=CALLED + r"builtins\.input;"),
    AdversarialCase(build=command_of_the_system, refused=CALLED + r"subprocess\.run;"),
    AdversarialCase(build=time_of_a_file_in_a_function_of_a_hook, refused=CALLED + r"time\.monotonic;"),
    AdversarialCase(build=file_that_is_read_on, refused=r"file was \d+ and is \d+ after the job"),
    AdversarialCase(build=lazy_layer, refused=r"model\.0\.weight, which a lazy module has not initialized yet"),
    AdversarialCase(
        build=training_without_gradients, refused=r"a call inside torch\.no_grad\(\) or torch\.inference_mode\(\)"
    ),
]
