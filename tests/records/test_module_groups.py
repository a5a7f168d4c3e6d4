"""Names of the same module in repeated layers are one name."""

import pytest

from rankless.records.program_by_module import format_modules


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        ([""], ""),
        (["model"], "model (X)"),
        (["model.0"], "model.0 (X)"),
        (["model.0", "model.0"], "model.0 (X)"),
        ([f"model.layers.{layer}.norm" for layer in range(12)], "model.layers.[0-11].norm (X)"),
        (["model.3", "model.0", "model.1"], "model.[0-1,3] (X)"),
        ([f"m.{a}.b.{b}" for a in range(2) for b in range(3)], "m.[0-1].b.[0-2] (X)"),
        (["m.0.b.1", "m.1.b.0"], "m.0.b.1 and 1 like it (X)"),
        (["m.conv1", "m.conv2"], "m.conv1 (X), m.conv2 (X)"),
        (["a", "b", "c", "d", "e"], "a (X), b (X), c (X) and 2 more"),
    ],
)
def test_modules_of_repeated_layers_are_one_name(paths: list[str], text: str) -> None:
    assert format_modules((path, "X") for path in paths) == text


def test_modules_of_other_classes_have_other_names() -> None:
    assert format_modules([("m.0", "Linear"), ("m.1", "ReLU"), ("m.2", "Linear")]) == "m.[0,2] (Linear), m.1 (ReLU)"
