"""Adversarial cases with values that change between calls: in objects, classes, modules and functions."""

import functools

import stale_settings
import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase
from adversarial_stale_values import scaled_by


class Holder:
    """Reads its scale in every way that a class can."""

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
    """Computes attributes that it does not have."""

    def __init__(self):
        self.hidden = {"scale": 1.0}

    def __getattr__(self, name):
        return vars(self)["hidden"][name]


def script_reading(read):
    """Return a script that reads from a `Holder` whose scale and items change."""
    holder = Holder()

    def change(number):
        holder.scale = holder.items[0] = number + 1.0

    return scaled_by(functools.partial(read, holder), change)


def property_of_an_object():
    return script_reading(lambda holder: holder.doubled)


def callable_object():
    return script_reading(lambda holder: holder())


def item_of_an_object():
    return script_reading(lambda holder: holder[0])


def number_that_an_object_stands_for():
    return script_reading(float)


def attribute_by_a_computed_name():
    return script_reading(lambda holder: getattr(holder, "sca" + "le"))


def attribute_by_vars():
    return script_reading(lambda holder: vars(holder)["".join(("sc", "ale"))])


def attribute_by_a_helper_function():
    return script_reading(lambda holder: inner_scale(holder))


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
        from stale_settings import scale  # noqa: PLC0415 - the case tests this

        return scale

    def change(number):
        stale_settings.scale = number + 1.0

    return scaled_by(read, change)


def default_argument():
    def read(scales=[1.0], *, power=1):  # noqa: B006 - the case tests this
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
        table.append(lambda: place + 1.0)  # noqa: B023 - the case tests this

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


SUPPORTED = [
    *(property_of_an_object, callable_object, item_of_an_object, number_that_an_object_stands_for),
    *(attribute_by_a_computed_name, attribute_by_vars, attribute_by_a_helper_function),
    *(object_in_a_list_of_objects, slot_of_an_object, attribute_that_a_class_computes, attribute_of_a_class),
    *(attribute_of_an_objects_class, attribute_that_comes_to_hide_its_class, settings_of_a_module),
    *(nested_settings_of_a_module, settings_read_by_their_module, settings_imported_inside, default_argument),
    *(attribute_of_a_function, keyword_of_a_partial, lambdas_in_a_table, lambda_in_a_table_replaced),
    *(closures_over_a_loop_variable, global_that_comes_to_hide_a_builtin, function_of_torch_replaced),
    *(code_of_a_function_replaced, method_rebound_on_an_object),
]
CASES = [AdversarialCase(build=build) for build in SUPPORTED]
