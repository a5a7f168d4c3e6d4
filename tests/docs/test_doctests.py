"""The public docstrings: their examples run, and they document every parameter and only exceptions that exist."""

import builtins
import doctest
import inspect
import re
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless import collectives, errors
from rankless.checkpoint import Checkpoints, Restored
from rankless.collectives import differentiable
from rankless.data.logical_tensor import LogicalTensor
from rankless.launch.spawn_function import Spawned

HANDED_OUT = (rankless.Job, rankless.Loader, Checkpoints, Restored, Spawned, LogicalTensor)
"""Classes whose objects public functions return. Users do not construct them."""
CONSTRUCTED = (rankless.Whole, rankless.PerDevice, collectives.P2POp, collectives.DistributedSampler)
NOT_OURS = {"ReduceOp": "torch's enum"}
DOCUMENTED_SPECIAL_METHODS = ("__call__", "__iter__", "__len__")
INTERNAL = {"Job.configure": "called by `rankless.job`"}
SHOWN_BY_THEIR_CLASS = {
    "LogicalTensor.local": "takes several ranks",
    "LogicalTensor.whole": "takes several ranks",
    "Spawned.process_ids": "differ from run to run",
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if (not name.startswith("_") or name in DOCUMENTED_SPECIAL_METHODS) and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield f"{kind.__name__}.{name}", member


def public_names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module, names in (
        ("rankless", rankless, rankless.__all__),
        ("collectives", collectives, collectives.__all__),
        ("differentiable", differentiable, differentiable.__all__),
    ):
        found |= {f"{prefix}.{name}": getattr(module, name) for name in names if name not in NOT_OURS}
    del found["rankless.__version__"]
    for kind in (*HANDED_OUT, *CONSTRUCTED):
        found[kind.__name__] = kind
        found |= {name: member for name, member in public_members(kind) if inspect.getdoc(member) is not None}
    for name in INTERNAL:
        found.pop(name, None)
    found |= {f"errors.{name}": kind for name, kind in vars(errors).items() if is_public_error(name, kind)}
    return found


def is_public_error(name: str, kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException) and not name.startswith("_")


PUBLIC = public_names()


def section(name: str, heading: str) -> str:
    """The text of a Google-style section of a docstring; empty if there is none."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    match = re.search(rf"^{heading}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return inspect.cleandoc("\n" + match[1]) if match else ""


def documented_names(name: str, heading: str) -> list[str]:
    return re.findall(r"^(\*{0,2}\w+)(?: \([^)]*\))?:", section(name, heading), re.MULTILINE)


def parameters(subject: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(subject).parameters.values()
    return [stars.get(item.kind, "") + item.name for item in found if item.name != "self"]


@pytest.fixture
def world_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    rankless.init()
    yield
    rankless.shutdown()


def starts_processes(name: str) -> bool:
    return "rankless.spawn(" in section(name, "Example")


IN_CI = {"collectives.all_reduce", "collectives.broadcast", "collectives.send", "spawn"}
"""Of the examples that start processes: one of each kind. The soak runs the others."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if not starts_processes(name):
        return []
    return [pytest.mark.slow] if name in IN_CI else [pytest.mark.slow, pytest.mark.exhaustive]


EXAMPLES = [pytest.param(name, marks=marks_of(name), id=name) for name in PUBLIC]


@pytest.mark.ci_sample(4)
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_public_docstring_run(name: str) -> None:
    names = {
        "__name__": "__main__",
        "collectives": collectives,
        "differentiable": differentiable,
        "rankless": rankless,
        "time": time,
        "torch": torch,
        "typing": typing,
    }
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]) or "", names, name, None, None)
    output: list[str] = []
    found = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=output.append)
    assert found.failed == 0, "".join(output)


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("errors.")])
def test_every_public_callable_has_an_example(name: str) -> None:
    if name not in SHOWN_BY_THEIR_CLASS and name != "Restored":
        assert ">>>" in section(name, "Example")


def has_parameters(subject: Any) -> bool:
    return not isinstance(subject, property) and not (
        isinstance(subject, type) and (subject in HANDED_OUT or issubclass(subject, BaseException))
    )


@pytest.mark.parametrize("name", [name for name, subject in PUBLIC.items() if has_parameters(subject)])
def test_every_parameter_is_documented_in_the_order_of_the_signature(name: str) -> None:
    assert documented_names(name, "Args") == parameters(PUBLIC[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_exceptions_named_under_raises_exist(name: str) -> None:
    for raised in documented_names(name, "Raises"):
        kind = getattr(errors, raised, None) or getattr(builtins, raised, None)
        assert isinstance(kind, type), raised
        assert issubclass(kind, BaseException), raised


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.startswith("errors.")])
def test_errors_say_when_they_are_raised_and_their_attributes(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    assert doc.startswith(("Raised ", "Base class "))
    assert documented_names(name, "Attributes") or "the attributes of `RanklessError`" in " ".join(doc.split())


def test_every_public_callable_is_annotated() -> None:
    for name, subject in PUBLIC.items():
        if has_parameters(subject) and not isinstance(subject, type):
            hints = inspect.signature(subject).parameters.values()
            assert all(item.annotation is not item.empty for item in hints if item.name != "self"), name
            assert inspect.signature(subject).return_annotation is not inspect.Signature.empty, name


TORCHS = {"rankless.loader": "DataLoader's, in seconds", "collectives.barrier": "torch.distributed's, a timedelta"}


def test_timeouts_of_ours_are_in_seconds_and_say_so() -> None:
    for name, subject in PUBLIC.items():
        if has_parameters(subject):
            found = [item for item in parameters(subject) if "timeout" in item]
            assert found == (["timeout"] if name in TORCHS else ["timeout_seconds"] if found else []), name


def test_a_first_line_ends_with_a_full_stop() -> None:
    for name, subject in PUBLIC.items():
        first = (inspect.getdoc(subject) or "").partition("\n\n")[0]
        assert first.endswith("."), name
