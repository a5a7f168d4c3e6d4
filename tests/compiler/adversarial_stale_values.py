"""Adversarial cases with values that change between calls: numbers, text, arrays, tensors, and containers of them."""

import array
import collections
import dataclasses
import decimal
import enum
import types

import numpy
import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron


def scaled_by(read, change, **options):
    """Return a script that scales its loss by `read()` and calls `change(number)` before each call."""
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


def entry_of_an_array():
    scales = array.array("d", [1.0, 2.0])

    def change(number):
        scales[1] = number + 1.0

    return scaled_by(lambda: scales[1], change)


def bytes_behind_a_view():
    scales = bytearray(b"abc")
    view = memoryview(scales)

    def change(number):
        scales[1] = number + 1

    return scaled_by(lambda: view[1], change)


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


SUPPORTED = [
    *(entry_of_an_array, bytes_behind_a_view),
    *(list_of_dicts, fields_of_dataclasses, list_in_a_dataclass, dataclass_taken_as_a_dict, six_attributes_deep),
    *(namedtuple_of_lists, member_of_an_enum, entry_of_a_numpy_array, numpy_array_as_a_tensor, numpy_scalar),
    *(decimal_number, integer_that_becomes_a_float, zero_that_becomes_negative, list_of_more_than_a_few_numbers),
    *(length_of_a_list, order_of_a_dict, entry_of_a_deque, entry_of_a_chain_of_dicts, entry_of_a_default_dict),
    *(attribute_of_a_dict, tensor_in_a_list_replaced, tensor_in_a_dict_changed_in_place),
    tensor_that_gets_another_shape,
]
REFUSED = [
    AdversarialCase(build=numpy_array_of_objects, refused=r"rates.*: a NumPy array of 16 bytes and dtype object")
]
CASES = [*(AdversarialCase(build=build) for build in SUPPORTED), *REFUSED]
