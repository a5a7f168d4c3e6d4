"""Operators without a rule are probed in a child process: split if that is right, whole if not, and never in doubt."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from simulated_ranks import Outcome, assert_near, run_source_on_simulated_ranks
from torch import Tensor, nn

from rankless.compiler.capture.capture import JobSource
from rankless.compiler.probing import operator_probe
from rankless.compiler.probing.operator_probe import (
    AnswerCache,
    CallNumber,
    OperatorProbe,
    ProbeAnswer,
    RowCheck,
    default_folder,
    find_coupled_row,
    run_in_child,
)
from rankless.errors import StepError
from rankless.parallel.mesh import Mesh

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(torch.float32)


def define(name: str, function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Any:
    """Return an operator of a script, with its gradient as another operator."""

    def run(x: Tensor) -> Tensor:
        return function(x).clone()

    def run_backward(x: Tensor, grad: Tensor) -> Tensor:
        return (gradient(x) * grad).clone()

    run.__annotations__ = {"x": Tensor, "return": Tensor}
    run_backward.__annotations__ = {"x": Tensor, "grad": Tensor, "return": Tensor}
    forward = torch.library.custom_op(f"probe_tests::{name}", run, mutates_args=())
    backward = torch.library.custom_op(f"probe_tests::{name}_backward", run_backward, mutates_args=())
    forward.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
    backward.register_fake(lambda x, grad: torch.empty_like(x, memory_format=torch.contiguous_format))  # noqa: ARG005
    forward.register_autograd(
        lambda ctx, grad: backward(ctx.saved_tensors[0], grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),  # noqa: ARG005
    )
    return forward


def crash(_x: Tensor) -> Tensor:
    os.abort()


def hang(x: Tensor) -> Tensor:
    time.sleep(600)
    return x


RARE = 12345.0
"""A number that no sample data has."""


def count_rare(x: Tensor) -> Tensor:
    """Return what depends on other rows if one of them holds a number that no sample data has."""
    return x * (1.0 + (x == RARE).sum())


HOME = os.getpid()
BENT = define("bent", lambda x: x.sin() * x, lambda x: x.cos() * x + x.sin())
CENTRED = define("centred", lambda x: x - x.mean(0), lambda x: torch.ones_like(x))
RARELY_COUPLED = define("rarely_coupled", count_rare, torch.ones_like)
CRASHING = define("crashing", lambda x: x * 2 if os.getpid() == HOME else crash(x), lambda x: torch.full_like(x, 2.0))
HANGING = define("hanging", lambda x: x * 2 if os.getpid() == HOME else hang(x), lambda x: torch.full_like(x, 2.0))


def run(function: Callable[[Tensor], Tensor], folder: Path, ranks: int = 3, rows: int = 7) -> Outcome:
    """Run a job with this function on simulated ranks, and compare it with the plain script."""
    model = nn.Linear(4, 4)
    x = torch.randn(rows, 4)

    def job(features: Tensor) -> tuple[Tensor, Tensor]:
        found = function(model(features))
        return found.square().sum(), found

    probe = OperatorProbe(Mesh(rank=0, size=ranks, device=CPU), AnswerCache(folder))
    source = JobSource(name="job", function=job, modules={"model": model}, trains=True)
    outcome = run_source_on_simulated_ranks(source, [x], ranks, probe=probe)
    loss, found = job(x)
    assert_near(outcome.results[0], loss.detach(), 1e-12, "the loss")
    assert_near(outcome.results[2], found.detach(), 1e-12, "the result")
    wanted = torch.autograd.grad(loss, tuple(model.parameters()))
    largest = max(float(item.abs().max()) for item in wanted)
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        assert_near(outcome.gradients[f"model.{name}"], gradient, 1e-12, name, floor=largest)
    return outcome


def names(nodes: Any) -> list[str]:
    return [str(node.target) for node in nodes]


def test_an_operator_of_the_script_is_split_forward_and_backward(tmp_path: Path):
    outcome = run(BENT, tmp_path)
    assert names(outcome.sharded.probed_nodes) == [
        "probe_tests.bent.default",
        "probe_tests.bent_backward.default",
    ]
    assert names(outcome.sharded.nodes_without_rule) == []
    assert not any(move.gathered and move.purpose == "operator" for move in outcome.local.collectives)
    assert list(tmp_path.iterdir()) == [], "the code of a script may change, so its answers are not kept"


@pytest.mark.parametrize("place", [0, 6])
def test_an_operator_that_was_split_is_compared_on_real_rows(place: int, tmp_path: Path):
    rows = torch.randn(7, 4)
    features = nn.Identity()

    def job(x: Tensor) -> tuple[Tensor, Tensor]:
        found = RARELY_COUPLED(features(x))
        return found.sum(), found

    def run_job() -> Outcome:
        probe = OperatorProbe(Mesh(rank=0, size=3, device=CPU), AnswerCache(tmp_path))
        source = JobSource(name="job", function=job, modules={"features": features}, trains=False)
        return run_source_on_simulated_ranks(source, [rows], 3, probe=probe)

    assert names(run_job().sharded.probed_nodes) == ["probe_tests.rarely_coupled.default"]
    rows[place, 1] = RARE
    with pytest.raises(StepError, match=r"each row of probe_tests.rarely_coupled.default to depend on no other row"):
        run_job()


def test_rows_are_compared_each_time_that_the_calls_have_doubled():
    calls = CallNumber()
    calls.value = 5
    check = RowCheck(operator=torch.exp, line="", lengths=(1, 1), inputs=(0,), outputs=(0,), calls=calls)
    due = []
    for number in range(5, 40):
        calls.value = number
        due += [number] if check.is_due() else []
    assert due == [5, 6, 7, 9, 13, 21, 37]


def test_an_integer_that_rounding_tips_over_is_no_coupling():
    rows = torch.randn(6, 4)

    def tipping(tensors: Any) -> Tensor:
        return (tensors[0].sum(1) + (0.5 if len(tensors[0]) == 6 else 0.0)).round()  # other kernels for other sizes

    own = tipping([rows[2:4]])
    assert find_coupled_row(tipping, [rows], (0, 0), (2, 2), [own]) is None
    largest = find_coupled_row(lambda given: given[0] == given[0].amax(0), [rows], (0, 0), (2, 2), [rows[2:4] == 0])
    assert (largest is None) == bool((rows.amax(0) > rows[2:4].amax(0)).all())


def test_an_operator_over_the_batch_stays_whole(tmp_path: Path):
    outcome = run(CENTRED, tmp_path)
    assert "probe_tests.centred.default" in names(outcome.sharded.nodes_without_rule)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_operator_of_pytorch_is_split_and_its_answer_kept(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def factors(x: Tensor) -> Tensor:
        pairs = torch.stack([x, x.square(), x.cos()], -1)
        reflected, scales = torch.geqrf(pairs.detach())
        return x * torch.ormqr(reflected, scales, pairs.detach())[:, :, 0]

    outcome = run(factors, tmp_path, ranks)
    assert "aten.ormqr.default" in names(outcome.sharded.probed_nodes)
    assert list(tmp_path.glob("*.json"))
    monkeypatch.setattr(operator_probe, "run_in_child", lambda *_: pytest.fail("the answer is on disk"))
    again = run(factors, tmp_path, ranks)
    assert names(again.sharded.probed_nodes) == names(outcome.sharded.probed_nodes)


def test_a_damaged_answer_is_asked_for_again(tmp_path: Path):
    first = run(
        lambda x: x * torch.linalg.matrix_exp(x[:, :, None] * x[:, None, :]).detach().sum((1, 2))[:, None], tmp_path
    )
    assert first.results
    for file in tmp_path.glob("*.json"):
        file.write_bytes(b'{"candidate": 9')
    run(lambda x: x * torch.linalg.matrix_exp(x[:, :, None] * x[:, None, :]).detach().sum((1, 2))[:, None], tmp_path)


def test_an_operator_that_crashes_in_the_experiment_stays_whole(tmp_path: Path):
    outcome = run(CRASHING, tmp_path)
    assert "probe_tests.crashing.default" in names(outcome.sharded.nodes_without_rule)


def test_an_operator_that_hangs_in_the_experiment_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operator_probe, "SECONDS", 0.5)
    outcome = run(HANGING, tmp_path)
    assert "probe_tests.hanging.default" in names(outcome.sharded.nodes_without_rule)


def test_large_values_are_not_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operator_probe, "MAX_BYTES", 100)
    assert names(run(BENT, tmp_path).sharded.probed_nodes) == []


def test_without_a_probe_nothing_is_split():
    model = nn.Linear(4, 4)
    source = JobSource(name="job", function=lambda x: BENT(model(x)).sum(), modules={"model": model}, trains=True)
    outcome = run_source_on_simulated_ranks(source, [torch.randn(6, 4)], 2)
    assert "probe_tests.bent.default" in names(outcome.sharded.nodes_without_rule)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: b"answer", b"answer"),
        (lambda: b"", None),
        (lambda: 1 / 0, None),
        (os.abort, None),
        (lambda: os._exit(0), None),
        (lambda: time.sleep(60), None),
        (lambda: os.write(1, b"silent") and b"x", b"x"),
    ],
)
def test_a_child_answers_or_ends(function: Any, expected: bytes | None, capfd: pytest.CaptureFixture[str]):
    before = psutil.Process().children()
    assert run_in_child(function, 1.0) == expected
    assert capfd.readouterr() == ("", "")
    assert psutil.Process().children() == before


def test_a_child_computes_after_its_parent_has_used_threads():
    x = torch.randn(600, 600)
    expected = x @ x
    assert run_in_child(lambda: str(float((x @ x - expected).abs().max()) < 1e-9).encode(), 20.0) == b"True"


def test_answers_are_kept_in_the_folder_for_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "rankless" / "probes"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache" / "rankless" / "probes"


def test_a_folder_that_cannot_be_written_is_no_answer(tmp_path: Path):
    (tmp_path / "file").write_text("")
    cache = AnswerCache(tmp_path / "file" / "probes")
    cache.save("question", ProbeAnswer(0, (0,)))
    assert cache.load("question") is None
    cache = AnswerCache(tmp_path / "probes")
    cache.save("question", ProbeAnswer(0, (0, None)))
    assert cache.load("question") == ProbeAnswer(0, (0, None))
    assert cache.load("another") is None
