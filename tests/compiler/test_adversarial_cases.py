"""Every adversarial case of capture: the job equals the plain script, or is refused with the line of the script."""

import inspect
import re

import adversarial_autograd
import adversarial_generators
import adversarial_layouts
import adversarial_memory
import adversarial_modules
import adversarial_parameters
import adversarial_python_state
import adversarial_recomputed
import adversarial_transforms
import adversarial_value_reads
import adversarial_values
import pytest
import torch
import torch.nn.functional as F
from adversarial_cases import (
    AdversarialCase,
    Script,
    assert_alike,
    perceptron,
    rows,
    run_captured,
    run_plain,
    start_script,
    without_layout,
)
from support.devices import DEVICE
from support.processes import on_mesh

from rankless.compiler.capture.capture import JobSource, capture
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.errors import CaptureError
from rankless.jobs.arguments import flatten_arguments, get_shapes
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

CASES = [
    *adversarial_python_state.CASES,
    *adversarial_autograd.CASES,
    *adversarial_generators.CASES,
    *adversarial_modules.CASES,
    *adversarial_memory.CASES,
    *adversarial_layouts.CASES,
    *adversarial_parameters.CASES,
    *adversarial_recomputed.CASES,
    *adversarial_transforms.CASES,
    *adversarial_values.CASES,
    *adversarial_value_reads.CASES,
]
SUPPORTED = [case for case in CASES if case.refused is None]
REFUSED = [case for case in CASES if case.refused is not None]
REFUSED_ON_ONE_DEVICE = {"backward_inside"}
WORKERS = 2
# Each rank rounds sums over its rows to bfloat16, so a split batch rounds differently.
ROUNDED_PER_RANK = {"autocast_inside"}


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.ci_sample(7)
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_the_captured_job_equals_the_plain_script(case: AdversarialCase):
    expected = run_plain(case)
    assert_alike(run_captured(Mesh.solo(DEVICE), case), expected, case.tolerance)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_the_job_is_refused_with_the_cause_and_the_line(case: AdversarialCase):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(DEVICE), case)
    assert re.search(case.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == case.line()


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SUPPORTED if str(case) not in ROUNDED_PER_RANK], ids=str)
def test_on_two_workers_every_rank_equals_the_plain_script(case: AdversarialCase):
    expected = run_plain(case)
    for calls in on_mesh(WORKERS, run_captured, case):
        assert_alike(calls, expected, case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED[::4], ids=str)
@pytest.mark.ci_sample(4)
def test_on_two_workers_a_job_that_is_no_program_trains_as_the_plain_script(case: AdversarialCase):
    if str(case) in REFUSED_ON_ONE_DEVICE:
        with pytest.raises(CaptureError) as raised:
            on_mesh(WORKERS, run_captured, case)
        assert re.search(case.refused, str(raised.value.found)), raised.value.found
        return
    expected = without_layout(run_plain(case))
    for calls in on_mesh(WORKERS, run_captured, case):
        assert_alike(without_layout(calls), expected, max(case.tolerance, 1e-11))


def captured(script: Script) -> LogicalProgram:
    device = DEVICE
    arguments = flatten_arguments(tuple(script.batches[0]), {}, device)
    code = script.function.__code__
    line = f"{display_name(code.co_filename)}:{code.co_firstlineno}"
    source = JobSource(name="loss", function=script.function, modules=script.modules, trains=True, line=line)
    return capture(source, arguments.unflatten, get_shapes(arguments), device).program


@pytest.mark.ci_sample(9)
@pytest.mark.parametrize("case", [case for case in SUPPORTED if not case.reads_values], ids=str)
def test_every_operator_forward_and_backward_has_a_line_of_the_script(case: AdversarialCase):
    script, _ = start_script(case)
    operators = [node for node in captured(script).graph.nodes if node.op == "call_function"]
    source = display_name(inspect.getsourcefile(case.build))
    without = [str(node.target) for node in operators if not node.meta["line"].startswith(f"{source}:")]
    assert operators
    assert without == []


def loss_of_several_lines() -> Script:
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        bent = scores.sigmoid()  # the line
        doubled = bent * 2
        return F.cross_entropy(doubled, labels)

    return Script(function=loss, modules={"model": model}, batches=[rows()])


def test_an_operator_and_its_backward_have_the_exact_line_of_their_origin():
    operators = [node for node in captured(loss_of_several_lines()).graph.nodes if node.op == "call_function"]
    lines = {str(node.target): node.meta["line"] for node in operators}
    marked = AdversarialCase(build=loss_of_several_lines).line()
    source, number = marked.rsplit(":", 1)
    assert lines["aten.sigmoid.default"] == lines["aten.sigmoid_backward.default"] == marked
    softmax, backward = "aten._log_softmax.default", "aten._log_softmax_backward_data.default"
    assert lines[softmax] == lines[backward] == f"{source}:{int(number) + 2}"
    assert [node.meta["line"] for node in operators if "mul" in str(node.target)] == [f"{source}:{int(number) + 1}"] * 2
