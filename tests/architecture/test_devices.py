"""A script may set a default device. Rankless names the device of every tensor that it makes."""

import ast

from architecture.sources import PACKAGE, nodes_of, python_files, short

CONSTRUCTORS = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros"),
}
AS_A_SCRIPT = (
    "extensions/horovod/selftest.py",
    "launch/startup_test_job.py",
    "runtime/doctor_collective_test.py",
)
"""Files that run as a script of their own, where nothing sets a default device."""


def names_no_device(call: ast.AST) -> bool:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    is_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    return (
        is_torch and call.func.attr in CONSTRUCTORS and not any(item.arg in ("device", None) for item in call.keywords)
    )


def test_a_new_tensor_has_a_device():
    found = [
        f"{short(file)}:{node.lineno}"
        for file in python_files(PACKAGE)
        if not short(file).endswith(AS_A_SCRIPT)
        for node in nodes_of(file)
        if names_no_device(node)
    ]
    assert found == []
