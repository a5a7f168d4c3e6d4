"""Traps of values that change between calls: in containers, objects, classes, modules, closures and arguments."""

import collections
import contextvars
import dataclasses
import decimal
import enum
import functools
import os
import queue
import sys
import threading
import types
import weakref

import numpy
import stale_settings
import torch
import torch.nn.functional as F
from traps import Script, Trap, batches, perceptron


def scaled_by(read, change, **options):
    """A script whose loss is scaled by what `read()` gives; before each call `change(number)` is done."""
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * read()

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change, **options)


def list_of_dicts():
    settings = [{"scale": 1.0}, {"scale": 2.0}]
    return scaled_by(lambda: settings[1]["scale"], lambda number: settings[1].update(scale=number + 1.0))


@dataclasses.dataclass
class Rate:
    value: float = 1.0
    steps: list = dataclasses.field(default_factory=lambda: [1.0])


@dataclasses.dataclass
class Settings:
    rate: Rate = dataclasses.field(default_factory=Rate)


def fields_of_dataclasses():
    settings = Settings()

    def change(number):
        settings.rate.value = number + 1.0

    return scaled_by(lambda: settings.rate.value, change)


def list_in_a_dataclass():
    settings = Settings()

    def change(number):
        settings.rate.steps[0] = number + 1.0

    return scaled_by(lambda: settings.rate.steps[0], change)


def dataclass_taken_as_a_dict():
    settings = Settings()

    def change(number):
        settings.rate.value = number + 1.0

    return scaled_by(lambda: dataclasses.asdict(settings)["rate"]["value"], change)


def six_attributes_deep():
    root = types.SimpleNamespace()
    last = root
    for name in ("alpha", "beta", "gamma", "delta", "epsilon"):
        setattr(last, name, types.SimpleNamespace())
        last = getattr(last, name)
    last.value = 1.0

    def change(number):
        last.value = number + 1.0

    return scaled_by(lambda: root.alpha.beta.gamma.delta.epsilon.value, change)


Pair = collections.namedtuple("Pair", "scale other")


def namedtuple_of_lists():
    pair = Pair([1.0], None)

    def change(number):
        pair.scale[0] = number + 1.0

    return scaled_by(lambda: pair.scale[0], change)


class Level(enum.Enum):
    LOW = 1.0
    HIGH = 3.0


def member_of_an_enum():
    level = Level.LOW

    def change(number):
        nonlocal level
        level = Level.HIGH if number else Level.LOW

    return scaled_by(lambda: level.value, change)


def entry_of_a_numpy_array():
    scales = numpy.array([1.0, 2.0])

    def change(number):
        scales[1] = number + 1.0

    return scaled_by(lambda: float(scales[1]), change)


def numpy_array_as_a_tensor():
    scales = numpy.ones(4)

    def change(number):
        scales[1] = number + 1.0

    return scaled_by(lambda: torch.tensor(scales).sum(), change)


def numpy_scalar():
    scale = numpy.float32(1.0)

    def change(number):
        nonlocal scale
        scale = numpy.float32(number + 1.0)

    return scaled_by(lambda: float(scale), change)


def numpy_array_of_objects():
    rates = numpy.array([Rate(), Rate()], dtype=object)
    model = perceptron()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels) * rates[1].value

    return Script(function=loss, modules={"model": model}, batches=batches())


def decimal_number():
    scale = decimal.Decimal("1.0")

    def change(number):
        nonlocal scale
        scale = decimal.Decimal(number + 1)

    return scaled_by(lambda: float(scale), change)


def integer_that_becomes_a_float():
    scale = 1

    def change(number):
        nonlocal scale
        scale = (1, 1.0, True)[number]

    return scaled_by(lambda: 2.0 if isinstance(scale, float) else 3.0 if scale is True else 1.0, change)


def zero_that_becomes_negative():
    zero = 0.0

    def change(number):
        nonlocal zero
        zero = -0.0 if number == 1 else 0.0

    return scaled_by(lambda: 2.0 if str(zero) == "-0.0" else 1.0, change)


def list_of_more_than_a_few_numbers():
    scales = [1.0] * 500

    def change(number):
        scales[400] = number + 1.0

    return scaled_by(lambda: scales[400], change)


def length_of_a_list():
    seen = [1]
    return scaled_by(lambda: len(seen), seen.append)


def order_of_a_dict():
    scales = {"a": 1.0, "b": 2.0, "c": 3.0}

    def change(_number):
        first = next(iter(scales))
        scales[first] = scales.pop(first)

    return scaled_by(lambda: next(iter(scales.values())), change)


def entry_of_a_deque():
    recent = collections.deque([1.0, 2.0], maxlen=2)
    return scaled_by(lambda: recent[-1], lambda number: recent.append(number + 1.0))


def entry_of_a_chain_of_dicts():
    own = {"scale": 1.0}
    scales = collections.ChainMap(own, {"scale": 5.0})
    return scaled_by(lambda: scales["scale"], lambda number: own.update(scale=number + 1.0))


def entry_of_a_default_dict():
    scales = collections.defaultdict(lambda: 1.0)
    return scaled_by(lambda: scales["scale"], lambda number: scales.update(scale=number + 1.0))


class Table(dict):
    """A dict of the user's own class, with attributes as entries."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def attribute_of_a_dict():
    settings = Table(scale=1.0)

    def change(number):
        settings.scale = number + 1.0

    return scaled_by(lambda: settings.scale, change)


def tensor_in_a_list_replaced():
    kept = [torch.ones((), dtype=torch.float64)]

    def change(number):
        kept[0] = torch.tensor(number + 1.0, dtype=torch.float64)

    return scaled_by(lambda: kept[0], change)


def tensor_in_a_dict_changed_in_place():
    kept = {"scale": torch.ones((), dtype=torch.float64)}
    return scaled_by(lambda: kept["scale"], lambda number: kept["scale"].fill_(number + 1.0))


def tensor_that_gets_another_shape():
    weights = torch.ones(1, dtype=torch.float64)

    def change(number):
        weights.data = torch.ones(number + 1, dtype=torch.float64)

    return scaled_by(lambda: weights.sum() * weights.shape[0], change)


class Holder:
    """An object that reads its scale in every way that a class can."""

    level = 1.0

    def __init__(self):
        self.scale = 1.0
        self.items = [1.0]

    @property
    def doubled(self):
        return self.scale * 2

    def __call__(self):
        return self.scale * 3

    def __getitem__(self, key):
        return self.items[key]

    def __float__(self):
        return self.scale * 5


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Computing:
    """Gives attributes that it does not have."""

    def __init__(self):
        self.hidden = {"scale": 1.0}

    def __getattr__(self, name):
        return vars(self)["hidden"][name]


def held(read):
    """A script that reads from a `Holder` whose scale and items change."""
    holder = Holder()

    def change(number):
        holder.scale = holder.items[0] = number + 1.0

    return scaled_by(functools.partial(read, holder), change)


def property_of_an_object():
    return held(lambda holder: holder.doubled)


def callable_object():
    return held(lambda holder: holder())


def item_of_an_object():
    return held(lambda holder: holder[0])


def number_that_an_object_stands_for():
    return held(float)


def attribute_by_a_computed_name():
    return held(lambda holder: getattr(holder, "sca" + "le"))


def attribute_by_vars():
    return held(lambda holder: vars(holder)["".join(("sc", "ale"))])


def attribute_by_a_helper_function():
    return held(lambda holder: inner_scale(holder))


def inner_scale(given):
    return given.scale


def object_in_a_list_of_objects():
    holders = [Holder(), Holder()]

    def change(number):
        holders[1].scale = number + 1.0

    return scaled_by(lambda: sum(holder.scale for holder in holders), change)


def slot_of_an_object():
    slotted = Slotted()

    def change(number):
        slotted.scale = number + 1.0

    return scaled_by(lambda: slotted.scale, change)


def attribute_that_a_class_computes():
    computing = Computing()
    return scaled_by(lambda: computing.scale, lambda number: computing.hidden.update(scale=number + 1.0))


def attribute_of_a_class():
    class Own(Holder):
        pass

    def change(number):
        Own.level = number + 1.0

    return scaled_by(lambda: Own.level, change)


def attribute_of_an_objects_class():
    class Own(Holder):
        pass

    own = Own()

    def change(number):
        Own.level = number + 1.0

    return scaled_by(lambda: own.level, change)


def attribute_that_comes_to_hide_its_class():
    own = Holder()

    def change(number):
        if number:
            own.level = number + 1.0

    return scaled_by(lambda: own.level, change)


def settings_of_a_module():
    def change(number):
        stale_settings.scale = number + 1.0

    return scaled_by(lambda: stale_settings.scale, change)


def nested_settings_of_a_module():
    def change(number):
        stale_settings.nested.rate.value = number + 1.0

    return scaled_by(lambda: stale_settings.nested.rate.value, change)


def settings_read_by_their_module():
    def change(number):
        stale_settings.scale = number + 1.0

    return scaled_by(lambda: stale_settings.factor(), change)


def settings_imported_inside():
    def read():
        from stale_settings import scale  # noqa: PLC0415 - what is trapped

        return scale

    def change(number):
        stale_settings.scale = number + 1.0

    return scaled_by(read, change)


def default_argument():
    def read(scales=[1.0], *, power=1):  # noqa: B006 - what is trapped
        return scales[0] ** power

    def change(number):
        read.__defaults__[0][0] = number + 1.0
        read.__kwdefaults__["power"] = number

    return scaled_by(read, change)


def attribute_of_a_function():
    def read():
        return read.scale

    def change(number):
        read.scale = number + 1.0

    return scaled_by(read, change)


def keyword_of_a_partial():
    table = {"scale": 1.0}
    read = functools.partial(lambda given: given["scale"], table)
    return scaled_by(read, lambda number: table.update(scale=number + 1.0))


def lambdas_in_a_table():
    chosen = ["one"]
    table = {"one": lambda: 1.0, "two": lambda: 2.0}

    def change(number):
        chosen[0] = ("one", "two", "one")[number]

    return scaled_by(lambda: table[chosen[0]](), change)


def lambda_in_a_table_replaced():
    table = {"one": lambda: 1.0}

    def change(number):
        table["one"] = lambda: number + 1.0

    return scaled_by(lambda: table["one"](), change)


def closures_over_a_loop_variable():
    table = []
    for place in range(3):
        table.append(lambda: place + 1.0)  # noqa: B023 - what is trapped

    def change(number):
        nonlocal place
        place = number

    return scaled_by(lambda: table[0]() + table[2](), change)


def global_that_comes_to_hide_a_builtin():
    def change(number):
        if number == 1:
            globals()["abs"] = lambda value: value * 7
        else:
            globals().pop("abs", None)

    return scaled_by(lambda: abs(3.0), change)


def function_of_torch_replaced():
    original = F.relu

    def change(number):
        F.relu = (lambda value: value * 3) if number == 1 else original

    return scaled_by(lambda: F.relu(torch.ones((), dtype=torch.float64)), change)


def code_of_a_function_replaced():
    def read():
        return 1.0

    def other():
        return 2.0

    codes = (read.__code__, other.__code__)

    def change(number):
        read.__code__ = codes[number % 2]

    return scaled_by(lambda: read(), change)


def method_rebound_on_an_object():
    holder = Holder()
    holder.factor = lambda: 1.0

    def change(number):
        holder.factor = lambda: number + 1.0

    return scaled_by(lambda: holder.factor(), change)


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
    """A script as a class: the job is a method, and most of its attributes are not the job's."""

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


REFUSED = [Trap(build=numpy_array_of_objects, refused=r"rates.*: a NumPy array of 16 bytes and dtype object")]
RIGHT = [
    *(list_of_dicts, fields_of_dataclasses, list_in_a_dataclass, dataclass_taken_as_a_dict, six_attributes_deep),
    *(namedtuple_of_lists, member_of_an_enum, entry_of_a_numpy_array, numpy_array_as_a_tensor, numpy_scalar),
    *(decimal_number, integer_that_becomes_a_float, zero_that_becomes_negative, list_of_more_than_a_few_numbers),
    *(length_of_a_list, order_of_a_dict, entry_of_a_deque, entry_of_a_chain_of_dicts, entry_of_a_default_dict),
    *(attribute_of_a_dict, tensor_in_a_list_replaced, tensor_in_a_dict_changed_in_place),
    *(tensor_that_gets_another_shape, property_of_an_object, callable_object, item_of_an_object),
    *(number_that_an_object_stands_for, attribute_by_a_computed_name, attribute_by_vars),
    *(attribute_by_a_helper_function, object_in_a_list_of_objects, slot_of_an_object),
    *(attribute_that_a_class_computes, attribute_of_a_class, attribute_of_an_objects_class),
    *(attribute_that_comes_to_hide_its_class, settings_of_a_module, nested_settings_of_a_module),
    *(settings_read_by_their_module, settings_imported_inside, default_argument, attribute_of_a_function),
    *(keyword_of_a_partial, lambdas_in_a_table, lambda_in_a_table_replaced, closures_over_a_loop_variable),
    *(global_that_comes_to_hide_a_builtin, function_of_torch_replaced, code_of_a_function_replaced),
    *(method_rebound_on_an_object, referent_of_a_weak_reference, value_of_a_thread, context_variable),
    *(environment_variable, environment_variable_that_appears, command_line, cached_function, evaluated_text),
    *(text_that_names_a_global, argument_that_is_an_object, arguments_that_compare_equal),
    *(annealed_coefficient_of_a_trainer, queue_that_is_looked_into),
]
TRAPS = [*(Trap(build=build) for build in RIGHT), *REFUSED]
