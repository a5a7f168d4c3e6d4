"""Faults planted in the real engine, on real workers: `verify` finds each of them, and the step at which it began."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import rankless

from rankless.cli.trial_runs import Trial
from rankless.observe.comparison import compare
from rankless.observe.recordings import Recording
from rankless.observe.verdict import Report, make_report, render_verdict
from rankless.plan.run_plan import Program

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import sabotages
sabotages.plant(sys.argv[1])
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

FOUND = {
    "dropped_gradient_reduction": "gradient of model.",
    "gradient_scaled_by_workers": "gradient of model.",
    "dropped_count_reduction": "result of train",
    "mean_of_means": "result of train",
    "local_batch_norm_statistics": "result of train",
    "running_statistics_not_updated": "model.1.running_mean",
    "other_seed_on_one_rank": "result of train",
    "skipped_batch": "result of train",
    "skipped_batch_on_one_rank": "result of train",
    "repeated_batch": "result of train",
    "row_given_twice": "result of train",
    "wrong_learning_rate": "model.0.weight",
    "skipped_optimizer_step": "model.0.weight",
    "stale_parameters_on_one_rank": "model.0.weight",
}
"""Each fault, and the tensor in which it shows first; all begin at the third step."""
STEP = 3


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The script's folder, its run on one worker, and that run disturbed: the same for every fault."""

    folder: Path
    one: Recording
    noise: list[Recording]

    def verdict(self, sabotage: str, workers: int) -> Report:
        many = trial(self.folder, sabotage).on_many(workers)
        return make_report(compare(self.one, many, self.noise), workers=workers)


def prepared(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).with_name("sabotages.py"), folder)
    return folder


def trial(folder: Path, sabotage: str) -> Trial:
    program = Program(kind="script", target=str(folder / "train.py"), arguments=(sabotage, "sgd"))
    recordings, logs = str(folder / "recordings"), str(folder / "log")
    return Trial(program=program, folder=recordings, seed=1, devices="cpu", log_folder=logs)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    folder = prepared(tmp_path_factory.mktemp("sabotages"))
    right = trial(folder, "nothing")
    return Baseline(folder=folder, one=right.on_one(), noise=right.disturbed(1))


@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_is_found_where_nothing_is_planted(baseline: Baseline, workers: int) -> None:
    report = baseline.verdict("nothing", workers)
    assert report.same, render_verdict(report)
    assert report.steps == 8


@pytest.mark.parametrize(("sabotage", "tensor"), FOUND.items(), ids=FOUND)
def test_a_fault_in_the_engine_is_found_and_its_step_named(baseline: Baseline, sabotage: str, tensor: str) -> None:
    report = baseline.verdict(sabotage, workers=2)
    assert not report.same
    assert report.first_difference is not None
    assert report.first_difference.step == STEP
    assert tensor in report.first_difference.tensor


@pytest.mark.parametrize(
    ("sabotage", "optimizer", "code"),
    [
        ("nothing", "adam", 0),
        ("mean_of_means", "adam", 1),
        ("dropped_gradient_reduction", "sgd", 1),
        ("local_batch_norm_statistics", "adam", 1),
    ],
)
def test_the_command_says_so_too(tmp_path: Path, sabotage: str, optimizer: str, code: int) -> None:
    options = ["-n", "3", "--devices", "cpu", "--json", "report.json"]
    job = rankless("verify", *options, "train.py", sabotage, optimizer, folder=prepared(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert job.returncode == code, job.stdout + job.stderr
    assert report["same"] is (code == 0)
    verdict = job.stdout.splitlines()[-1]
    assert verdict.startswith(f"NOT the same training: first at step {STEP}, " if code else "same training: 8 steps")
    assert report["decided_in"] == "float64"
    assert report["own_precision"] is None
