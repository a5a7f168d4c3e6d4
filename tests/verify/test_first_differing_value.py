"""The first value that differs in a job call, on values made by hand."""

import math

import msgspec
import pytest

from rankless.config.run_config import InspectedCall
from rankless.records.verify_recording_format import ComputedValue, Role, TensorSummary
from rankless.verify.first_differing_value import FirstDifferingValue, find_first_value, render_first_value

CALL = InspectedCall(job="train", call=3)


def value(
    role: Role, name: str, number: float, *, dtype: str = "float64", inputs: tuple[str, ...] = ()
) -> ComputedValue:
    return ComputedValue(
        role, name, f"operator of {name}", "/a/train.py:7", dtype, (2,), TensorSummary(abs(number), (number,)), inputs
    )


RIGHT = [
    value("input", "argument 0", 3, dtype="int64"),
    value("value", "mul", 2),
    value("value", "mask", 1, dtype="bool"),
    value("value", "sub", 1e-15, inputs=("mul",)),
    value("value", "mm", 5),
    value("output", "gradient of w", 5, inputs=("mm",)),
    value("plain", "gradient of w", 5),
]
MANY = [item for item in RIGHT if item.role != "plain"]


def with_number(values: list[ComputedValue], name: str, number: float, role: Role | None = None) -> list[ComputedValue]:
    return [
        msgspec.structs.replace(item, value=TensorSummary(abs(number), (number,)))
        if item.name == name and role in (None, item.role)
        else item
        for item in values
    ]


def found(
    one: list[ComputedValue], *many: list[ComputedValue], noise: list[ComputedValue] | None = None
) -> FirstDifferingValue:
    first = find_first_value(one, many, one if noise is None else noise, call=CALL)
    assert first is not None
    return first


def test_the_first_different_value_in_program_order_is_named() -> None:
    wrong = with_number(with_number(MANY, "mm", 6), "gradient of w", 6)
    first = found(RIGHT, MANY, wrong)
    assert (first.fault, first.name, first.rank, first.line) == ("value", "mm", 1, "/a/train.py:7")
    assert render_first_value(first).startswith(
        "first value that differs, in call 3 of train: train.py:7, operator of mm, float64[2]: 1 apart, at most 5e-12"
    )
    earlier = found(RIGHT, wrong, with_number(wrong, "mul", 3))
    assert (earlier.name, earlier.rank) == ("mul", 1)


@pytest.mark.parametrize(
    ("name", "number", "fault"), [("argument 0", 4, "input"), ("gradient of w", 7, "output"), ("mask", 0, "after")]
)
def test_the_kind_of_difference_names_the_fault(name: str, number: float, fault: str) -> None:
    first = found(RIGHT, with_number(MANY, name, number))
    assert first.fault == fault
    assert render_first_value(first)


def test_a_different_plain_call_is_a_fault_of_the_capture() -> None:
    assert found(with_number(RIGHT, "gradient of w", 9, "plain"), MANY).fault == "capture"


def test_different_programs_are_reported() -> None:
    assert found(RIGHT, MANY[:-1]).fault == "program"


def test_a_cancelling_value_is_measured_by_its_inputs() -> None:
    assert found(RIGHT, with_number(MANY, "sub", -4e-15)).fault == "after"
    assert found(RIGHT, with_number(MANY, "sub", -1e-12)).name == "sub"


def test_noise_widens_the_limit_ten_times() -> None:
    noise = with_number(RIGHT, "mm", 5 + 1e-6)
    assert found(RIGHT, with_number(MANY, "mm", 5 + 9e-6), noise=noise).fault == "after"
    assert found(RIGHT, with_number(MANY, "mm", 5 + 2e-5), noise=noise).name == "mm"


def test_a_tolerance_replaces_the_noise() -> None:
    wrong = with_number(MANY, "mm", 5.01)
    assert find_first_value(RIGHT, [wrong], RIGHT, call=CALL, tolerance=0.01).fault == "after"  # type: ignore[union-attr]
    assert find_first_value(RIGHT, [wrong], RIGHT, call=CALL, tolerance=0.001).name == "mm"  # type: ignore[union-attr]


def test_a_non_finite_value_differs_from_a_finite_one() -> None:
    assert found(RIGHT, with_number(MANY, "mm", math.nan)).size == math.inf
    both = with_number(RIGHT, "mm", math.nan)
    assert found(both, with_number(MANY, "mm", math.nan)).fault == "after"


def test_a_call_that_was_not_made_has_no_first_value() -> None:
    assert find_first_value([], [MANY], [], call=CALL) is None
    assert find_first_value(RIGHT, [MANY, []], RIGHT, call=CALL) is None
