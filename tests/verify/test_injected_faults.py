"""Faults injected into real runs: `verify` finds each of them and the step at which it begins."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from support.verify_output import read_verdict, report_on
from support.warm_runs import fork_server_pool, rankless

from rankless.config.run_config import InspectedCall, Program
from rankless.launch.agent import make_job_runner
from rankless.verify.decision_report import VerifyReport
from rankless.verify.differences_beyond_tolerance import compare
from rankless.verify.first_differing_value import find_first_value
from rankless.verify.read_and_combine_recordings import Recording
from rankless.verify.runs import RunFailed, VerifyRuns

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import injected_faults
injected_faults.inject(sys.argv[1])
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4)
)
kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
optimizer = kinds[sys.argv[2]](model.parameters(), lr=0.1)
inputs, labels = torch.randn(36, 6), torch.randint(0, 4, (36,))
labels[::5] = -100

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

for epoch in range(2):
    for batch in rankless.loader(torch.utils.data.TensorDataset(inputs, labels), batch_size=9, shuffle=True, seed=0):
        train(*batch)
"""

MODEL, CALL = "model(inputs)", "train(*batch)"
FOUND = {
    "dropped_gradient_reduction": ("gradient of model.", "output", MODEL, "mm"),
    "gradient_scaled_by_workers": ("gradient of model.", "output", MODEL, "mm"),
    "dropped_count_reduction": ("result of train", "value", MODEL, "nll_loss_forward"),
    "mean_of_means": ("result of train", "value", MODEL, "nll_loss_forward"),
    "local_batch_norm_statistics": ("result of train", "value", MODEL, "_native_batch_norm_legit_functional"),
    "running_statistics_not_updated": ("model.1.running_mean", "value", MODEL, "_native_batch_norm_legit_functional"),
    "skipped_batch": ("result of train", "input", CALL, ""),
    "repeated_batch": ("result of train", "input", CALL, ""),
    "row_given_twice": ("result of train", "input", CALL, ""),
    "wrong_learning_rate": ("model.0.weight", "after", None, ""),
    "skipped_optimizer_step": ("model.0.weight", "after", None, ""),
    "stale_parameters_on_one_rank": ("model.0.weight", "after", None, ""),
}
"""Each fault, and the tensor in which it shows first; all begin at the third step. Then the first different value in
that step's job call: its kind, the code on its line, and its operator. If only the optimizer step is wrong, there is
no value.
"""
STOPPED = {"other_seed_on_one_rank": "call 4 of job 'train'", "skipped_batch_on_one_rank": "call 3 of job 'train'"}
"""Faults that the ranks detect by themselves, and the call at which they stop."""
STEP = 3


THIRD_CALL = InspectedCall(job="train", call=STEP)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The script's folder, its run on one worker, and the perturbed run: the same for every fault."""

    folder: Path
    one: Recording
    noise: list[Recording]

    def runs(self, fault: str) -> VerifyRuns:
        return runs(self.folder, fault)

    def verdict(self, fault: str, workers: int) -> VerifyReport:
        inspected = self.runs(fault)
        comparison = compare(self.one, inspected.run_many(workers), self.noise)
        (one,), many, (noise,) = (
            inspected.read_inspected_values("one"),
            inspected.read_inspected_values("many", workers),
            inspected.read_inspected_values("noise0"),
        )
        first = find_first_value(one, many, noise, call=THIRD_CALL)
        return msgspec.structs.replace(report_on(comparison, workers=workers), first_value=first)


def write_scripts(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).with_name("injected_faults.py"), folder)
    return folder


def runs(folder: Path, fault: str) -> VerifyRuns:
    """Return runs that also record every value of the third step's call, so that no further run is needed."""
    program = Program(kind="script", target=str(folder / "train.py"), arguments=(fault, "sgd"))
    recordings, logs = str(folder / "recordings"), str(folder / "log")
    return VerifyRuns(
        program=program,
        folder=recordings,
        seed=1,
        devices="cpu",
        log_folder=logs,
        inspected=THIRD_CALL,
        run_job=make_job_runner(fork_server_pool()),
    )


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    folder = write_scripts(tmp_path_factory.mktemp("faults"))
    correct = runs(folder, "nothing")
    return Baseline(folder=folder, one=correct.run_one(), noise=correct.run_perturbed(1))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_is_found_without_an_injected_fault(baseline: Baseline, workers: int) -> None:
    report = baseline.verdict("nothing", workers)
    assert report.same, report.text
    assert report.steps == 8
    assert report.first_value is not None
    assert report.first_value.fault == "after"  # every value of the third call agrees


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("fault", FOUND)
def test_an_injected_fault_is_found_with_its_step_and_line(baseline: Baseline, fault: str) -> None:
    tensor, kind, line, operator = FOUND[fault]
    report = baseline.verdict(fault, workers=2)
    assert not report.same
    assert report.first_difference is not None
    assert report.first_difference.step == STEP
    assert tensor in report.first_difference.tensor
    first = report.first_value
    assert first is not None
    assert (first.fault, first.job, first.call) == (kind, "train", STEP)
    if line is not None:
        file, _, number = first.line.rpartition(":")
        assert Path(file).name == "train.py"
        assert line in SCRIPT.splitlines()[int(number) - 1]
        assert first.operator == operator


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", STOPPED)
def test_a_diverging_rank_stops_the_run_at_its_call(
    baseline: Baseline, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed):
        baseline.runs(fault).run_many(2)
    errors = capsys.readouterr().err
    assert "RanksDiverged" in errors
    assert STOPPED[fault] in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "optimizer", "code"),
    [
        ("nothing", "adam", 0),
        ("mean_of_means", "adam", 1),
        pytest.param("dropped_gradient_reduction", "sgd", 1, marks=pytest.mark.exhaustive),
        pytest.param("local_batch_norm_statistics", "adam", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_the_command_reports_the_fault(tmp_path: Path, fault: str, optimizer: str, code: int) -> None:
    options = ["-n", "3", "--devices", "cpu", "--json", "report.json"]
    job = rankless("verify", *options, "train.py", fault, optimizer, folder=write_scripts(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert job.returncode == code, job.stdout + job.stderr
    assert report["same"] is (code == 0)
    verdict = read_verdict(job.stdout)
    assert verdict.startswith(f"NOT the same training: first at step {STEP}, " if code else "same training: 8 steps")
    assert report["decided_in"] == "float64"
    assert report["own_precision"] is None
    assert ("first value that differs, in call 3 of train: train.py:20, " in job.stdout) is (code == 1)
