"""`verify --against` where recordings differ and trainings do not: values set before their use, gradients of zero."""

from pathlib import Path

import pytest
from support.warm_runs import fork_server_pool

from rankless.config.run_config import Program
from rankless.launch.agent import make_job_runner
from rankless.verify.comparison_with_reference_script import compare_with_reference, list_training_steps
from rankless.verify.differences_beyond_tolerance import Comparison, compare
from rankless.verify.read_and_combine_recordings import Recording
from rankless.verify.runs import VerifyRuns

pytestmark = pytest.mark.slow


def compare_scripts(script: str, plain: str, argument: str, folder: Path) -> tuple[Recording, Comparison]:
    """Run both scripts on one worker, in float64, and compare them."""
    (folder / "train.py").write_text(script)
    (folder / "plain.py").write_text(plain)
    runs = VerifyRuns(
        program=Program(kind="script", target=str(folder / "train.py"), arguments=(argument,)),
        folder=str(folder / "recordings"),
        seed=1,
        devices="cpu",
        log_folder=str(folder / "log"),
        against=str(folder / "plain.py"),
        dtype="float64",
        run_job=make_job_runner(fork_server_pool()),
    )
    reference = runs.run_reference()
    assert reference is not None
    one, noise = runs.run_one(), runs.run_perturbed(1)
    return one, compare_with_reference(compare(one, [], noise), reference, one, [], noise)


CLIPPED = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(36, 6), torch.randint(0, 4, (36,)))
"""
CLIPPED_PLAIN = (
    CLIPPED
    + """
import sys
for inputs, labels in DataLoader(data, 9, shuffle=True, generator=torch.Generator().manual_seed(0)):
    for parameter in model.parameters():
        parameter.data.clamp_(-float(sys.argv[1]), 0.1)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""
)
CLIPPED_SCRIPT = (
    CLIPPED
    + """
import rankless

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return F.cross_entropy(model(inputs), labels)

for batch in rankless.loader(data, 9, shuffle=True, seed=0):
    train(*batch)
"""
)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("bound", "is_same"), [("0.1", True), ("0.1001", False)])
def test_first_values_differ_only_if_a_step_used_them(bound: str, is_same: bool, tmp_path: Path) -> None:
    _, comparison = compare_scripts(CLIPPED_SCRIPT, CLIPPED_PLAIN, bound, tmp_path)
    assert [finding.location.step for finding in comparison.findings] == ([] if is_same else [0])


SHIFTED = """
import sys
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4, bias=False)
        self.shift = torch.nn.Parameter(torch.zeros(1))  # of all classes alike: the softmax takes it out again
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, inputs):
        return self.linear(inputs) + used.get("shift", 1) * self.shift + used.get("bias", 1) * self.bias

torch.manual_seed(0)
used = {}
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(180, 6), torch.randint(0, 4, (180,)))
"""
SHIFTED_PLAIN = (
    SHIFTED
    + """
used = {sys.argv[1]: 0}
for inputs, labels in DataLoader(data, 9, shuffle=True, generator=torch.Generator().manual_seed(0)):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""
)
SHIFTED_SCRIPT = (
    SHIFTED
    + """
import rankless

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

for batch in rankless.loader(data, 9, shuffle=True, seed=0):
    train(*batch)
"""
)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("unused", "tensors"), [("shift", []), ("bias", ["gradient of model.bias"])])
def test_a_gradient_of_zero_equals_one_that_is_all_rounding(unused: str, tensors: list[str], tmp_path: Path) -> None:
    one, comparison = compare_scripts(SHIFTED_SCRIPT, SHIFTED_PLAIN, unused, tmp_path)
    gradients = [
        state.gradient
        for step in list_training_steps(one)
        for state in step.stepped.tensors
        if state.name == "model.shift"
    ]
    assert all(gradient is not None for gradient in gradients)
    assert any(gradient.norm != 0 for gradient in gradients)  # in most steps: which, depends on the processor
    assert [finding.tensor for finding in comparison.findings] == tensors
