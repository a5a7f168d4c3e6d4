"""`rankless verify --against plain.py`: a script compared with its plain reference, which does not use Rankless."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.verify_output import read_verdict, report_on
from support.warm_runs import fork_server_pool, rankless

from rankless.config.run_config import Program
from rankless.launch.agent import make_job_runner
from rankless.verify.comparison_with_reference_script import ReferenceRun, compare_with_reference, measure_reference
from rankless.verify.differences_beyond_tolerance import Comparison, compare
from rankless.verify.read_and_combine_recordings import Recording
from rankless.verify.runs import RunFailed, VerifyRuns

pytestmark = pytest.mark.slow

BOTH = """
import sys
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4)
)
inputs, labels = torch.randn(36, 6), torch.randint(0, 4, (36,))
data = TensorDataset(inputs, labels)
"""

SCRIPT = (
    BOTH
    + """
import rankless
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

for epoch in range(2):
    for batch in rankless.loader(data, batch_size=9, shuffle=True, seed=0):
        train(*batch)
"""
)

REFERENCE = (
    BOTH
    + """
weights = [item for item in model.parameters() if item.dim() > 1]
others = [item for item in model.parameters() if item.dim() == 1]
groups = [{"params": others}, {"params": weights}] if "groups" in sys.argv else model.parameters()
optimizer = torch.optim.Adam(groups, lr=0.01)
step = 0
for epoch in range(2):
    for inputs, labels in DataLoader(data, batch_size=9, shuffle=True, generator=torch.Generator().manual_seed(0)):
        step += 1
        late = step >= 3
        if step == 1 and "initial" in sys.argv:
            model[0].weight.data.mul_(1.01)
        if late and "rate" in sys.argv:
            optimizer.param_groups[0]["lr"] = 0.011
        if late and "order" in sys.argv:
            inputs, labels = inputs.roll(1, 0), labels
        if not (late and "zero_grad" in sys.argv):
            optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        if "halves" in sys.argv:
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()
        else:
            loss.backward()
        optimizer.step()
        if step == 7 and "shorter" in sys.argv:
            sys.exit()
"""
)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    runs: VerifyRuns
    one: Recording
    many: list[Recording]
    """Every rank of the runs on 2 and on 3 workers."""
    noise: list[Recording]

    def compare_with(self, reference: ReferenceRun) -> Comparison:
        # Ranks of one run must agree; those of two runs round differently.
        comparison = compare(self.one, self.many[:2], self.noise)
        return compare_with_reference(comparison, reference, self.one, self.many, self.noise)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    folder = tmp_path_factory.mktemp("against")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "plain.py").write_text(REFERENCE)
    runs = VerifyRuns(
        program=Program(kind="script", target=str(folder / "train.py")),
        folder=str(folder / "recordings"),
        seed=1,
        devices="cpu",
        log_folder=str(folder / "log"),
        against=str(folder / "plain.py"),
        dtype="float64",
        run_job=make_job_runner(fork_server_pool()),
    )
    many = [*runs.run_many(2), *runs.run_many(3)]
    return Baseline(runs=runs, one=runs.run_one(), many=many, noise=runs.run_perturbed(1))


def compare_with_options(baseline: Baseline, *options: str) -> Comparison:
    program = replace_arguments(baseline.runs.program, options)
    reference = replace(baseline.runs, program=program).run_reference()
    assert reference is not None
    return baseline.compare_with(reference)


def replace_arguments(program: Program, options: tuple[str, ...]) -> Program:
    return Program(kind=program.kind, target=program.target, arguments=options)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", ["", "groups", "halves"])
def test_a_script_is_the_same_training_as_any_form_of_its_reference(baseline: Baseline, form: str) -> None:
    comparison = compare_with_options(baseline, form)
    report = report_on(comparison, workers=2)
    assert report.same, report.text
    # Per run: 9 tensors at the start and at the end; 8 steps of a loss, 9 parameters and buffers, 6 gradients.
    assert comparison.rows[-1].compared == (len(baseline.many) + 1) * (9 + 9 + 8 * (1 + 9 + 6))


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(
    ("fault", "step", "tensor"),
    [
        ("initial", 0, "model.0.weight"),
        ("rate", 3, "model.0.weight"),
        ("order", 3, "result of train"),
        ("zero_grad", 3, "gradient of model."),
        ("shorter", 8, "the steps"),
    ],
)
def test_a_fault_against_the_reference_is_found_with_its_step(
    baseline: Baseline, fault: str, step: int, tensor: str
) -> None:
    report = report_on(compare_with_options(baseline, fault), workers=2)
    assert not report.same
    assert report.first_difference is not None
    assert report.first_difference.step == step
    assert tensor in report.first_difference.tensor
    assert "plain.py" in report.first_difference.expected


def test_a_reference_script_that_calls_rankless_raises(baseline: Baseline, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(SCRIPT)
    with pytest.raises(RunFailed, match="failed with exit code 1"):
        replace(baseline.runs, against=str(tmp_path / "plain.py")).run_reference()


def test_a_reference_script_without_a_step_raises(baseline: Baseline, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch")
    with pytest.raises(RunFailed, match=r"plain\.py made no optimizer step"):
        replace(baseline.runs, against=str(tmp_path / "plain.py")).run_reference()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options"), [("lenet", ("--epochs", "1")), ("gpt", ("--layers", "1"))])
def test_the_examples_are_the_same_training_as_their_references(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    examples = Path(__file__).parents[2] / "examples"
    reference, script = str(examples / f"plain_{name}.py"), str(examples / f"{name}.py")
    job = rankless("verify", "-n", "3", "--steps", "4", "--against", reference, script, *options, folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f", as in plain_{name}.py (stopped after 4 steps)" in read_verdict(job.stdout)


@pytest.mark.exhaustive
def test_the_command_compares_with_the_reference_in_own_precision(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text(REFERENCE)
    options = ["-n", "2", "--devices", "cpu", "--steps", "3", "--against", "plain.py"]
    job = rankless("verify", *options, "train.py", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "against plain.py" in job.stdout
    verdict = read_verdict(job.stdout)
    assert verdict.startswith("same training: 3 steps")
    assert ", as in plain.py (stopped after 3 steps)" in verdict


TRANSFORMED = """
import sys
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

class Transformed(Dataset):
    inputs, labels = torch.randn(24, 6, generator=torch.Generator().manual_seed(2)), torch.arange(24) % 4

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(6), self.labels[index]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
"""
TRANSFORMED_PLAIN = (
    TRANSFORMED
    + """
for inputs, labels in DataLoader(Transformed(), 8, shuffle=True, generator=torch.Generator().manual_seed(0)):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""
)
TRANSFORMED_SCRIPT = (
    TRANSFORMED
    + """
import rankless

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

for batch in rankless.loader(Transformed(), int(sys.argv[2]), shuffle=True, seed=0, reading=sys.argv[1]):
    train(*batch)
"""
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "verdict", "cause", "advice"),
    [
        (("replicated", "8"), "same training: 3 steps", "", ""),
        (
            ("split", "8"),
            "NOT the same training: first at step 1",
            "cause: other inputs: in step 1 8 of 8 rows that the model gets are others than in plain.py",
            'reading="replicated"',
        ),
        pytest.param(
            ("replicated", "4"),
            "NOT the same training: first at step 1",
            "cause: other inputs: step 1 trains on 8 rows in plain.py and on 4 here",
            "the same batch size",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_other_inputs_than_the_references_are_named_as_the_cause(
    options: tuple[str, ...], verdict: str, cause: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRANSFORMED_SCRIPT)
    (tmp_path / "plain.py").write_text(TRANSFORMED_PLAIN)
    job = rankless(
        "verify", "-n", "2", "--devices", "cpu", "--against", "plain.py", "train.py", *options, folder=tmp_path
    )
    assert verdict in job.stdout, job.stdout + job.stderr
    assert cause in job.stdout
    assert advice in job.stdout


DISTILLED = """
import copy
import sys
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
student = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
if "eval" in sys.argv:
    teacher.eval()
data = TensorDataset(torch.randn(36, 6), torch.randint(0, 4, (36,)))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
"""
DISTILLED_PLAIN = (
    DISTILLED
    + """
for inputs, labels in DataLoader(data, 9, shuffle=True, generator=torch.Generator().manual_seed(0)):
    with torch.no_grad():
        expected = teacher(inputs)
    found = student(inputs)
    optimizer.zero_grad()
    (F.cross_entropy(found, labels) + F.mse_loss(found, expected)).backward()
    optimizer.step()
"""
)
DISTILLED_SCRIPT = (
    DISTILLED
    + """
import rankless

@rankless.job(model={"student": student, "teacher": teacher}, optimizer=optimizer)
def train(inputs, labels):
    with torch.no_grad():
        expected = teacher(inputs)
    found = student(inputs)
    return F.cross_entropy(found, labels) + F.mse_loss(found, expected)

for batch in rankless.loader(data, 9, shuffle=True, seed=0):
    train(*batch)
"""
)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_frozen_copy_of_a_model_is_matched_with_the_references_frozen_copy(
    mode: str, baseline: Baseline, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(DISTILLED_SCRIPT)
    (tmp_path / "plain.py").write_text(DISTILLED_PLAIN)
    runs = replace(
        baseline.runs,
        program=Program(kind="script", target=str(tmp_path / "train.py"), arguments=(mode,)),
        folder=str(tmp_path / "recordings"),
        against=str(tmp_path / "plain.py"),
    )
    reference = runs.run_reference()
    assert reference is not None
    differences, mismatch = measure_reference(reference.recording, runs.run_one())
    assert mismatch is None
    assert {item.tensor.partition(".")[0] for item in differences if item.kind == "final"} == {"student", "teacher"}
    assert max(item.size for item in differences) < 1e-12
