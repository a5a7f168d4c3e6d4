"""The same faults with shapes that vary from batch to batch, and in a run that resumes from a checkpoint."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.verify_output import read_verdict, report_on
from support.warm_runs import fork_server_pool, rankless
from verify.test_injected_faults import FOUND, STEP
from verify.test_injected_faults import STOPPED as DIVERGING

from rankless.config.run_config import Program
from rankless.launch.agent import make_job_runner
from rankless.verify.decision_report import VerifyReport
from rankless.verify.differences_beyond_tolerance import compare
from rankless.verify.read_and_combine_recordings import Recording
from rankless.verify.runs import RunFailed, VerifyRuns

pytestmark = pytest.mark.slow

BEGINNING = """
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return F.cross_entropy(model(inputs.flatten(0, -2)), labels.flatten())
"""

VARIABLE = """
def samples(epoch):
    for index in range(37):
        longest = 4 + 2 * (index // 9) + epoch
        length = longest if index % 9 == 0 else int(torch.randint(2, longest, ()))
        yield torch.randn(length, 6), torch.randint(0, 4, (length,))

def padded(samples):
    inputs, labels = zip(*samples)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(labels, batch_first=True, padding_value=-100)

for epoch in range(2):
    for batch in rankless.loader(list(samples(epoch)), batch_size=9, collate_fn=padded, reading="replicated"):
        train(*batch)
"""
"""Batches of 9 rows, each of another length, and a last one of a single row: all shapes differ."""

RESUMED = """
inputs, labels = torch.randn(36, 6), torch.randint(0, 4, (36,))
labels[torch.rand(36) < 0.4] = -100
loader = rankless.loader(torch.utils.data.TensorDataset(inputs, labels), batch_size=9, shuffle=True)
if sys.argv[2] == "resumes":
    rankless.load("checkpoint", model=model, optimizer=optimizer)
for epoch in range(2):
    for batch in loader:
        train(*batch)
if sys.argv[2] == "saves":
    rankless.save("checkpoint", model=model, optimizer=optimizer)
"""
"""The checkpoint also restores the order of samples and dropout, because both come from torch's generator."""

SCRIPTS = {"variable": BEGINNING + VARIABLE, "resumed": BEGINNING + RESUMED}
STEPS = {"variable": 10, "resumed": 8}
CASES = [(kind, fault) for kind in SCRIPTS for fault in FOUND]
STOPPED = [(kind, fault) for kind in SCRIPTS for fault in DIVERGING]
"""Faults for which the ranks stop by themselves, because their inputs or random numbers differ."""
SAMPLE = random.Random(3).sample(CASES, 4)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A script's working folder, its run on one worker, and the perturbed run."""

    folder: Path
    one: Recording
    noise: list[Recording]

    def verdict(self, fault: str, workers: int) -> VerifyReport:
        many = runs(fault).run_many(workers)
        return report_on(compare(self.one, many, self.noise), workers=workers)


def runs(fault: str) -> VerifyRuns:
    program = Program(kind="script", target="train.py", arguments=(fault, "resumes"))
    return VerifyRuns(
        program=program,
        folder="recordings",
        seed=1,
        devices="cpu",
        log_folder="log",
        run_job=make_job_runner(fork_server_pool()),
    )


@pytest.fixture(scope="module")
def folders() -> dict[str, Baseline]:
    """Filled by `baseline` as tests request kinds."""
    return {}


@pytest.fixture
def baseline(
    kind: str, folders: dict[str, Baseline], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Baseline:
    if kind not in folders:
        folder = tmp_path_factory.mktemp(kind)
        (folder / "train.py").write_text(SCRIPTS[kind])
        shutil.copy(Path(__file__).with_name("injected_faults.py"), folder)
        monkeypatch.chdir(folder)
        if kind == "resumed":
            first = rankless("run", "-n", "1", "--devices", "cpu", "train.py", "nothing", "saves", folder=folder)
            assert first.returncode == 0, first.stderr
        correct = runs("nothing")
        folders[kind] = Baseline(folder=folder, one=correct.run_one(), noise=correct.run_perturbed(1))
    monkeypatch.chdir(folders[kind].folder)
    return folders[kind]


def require_nothing_found(baseline: Baseline, kind: str, workers: int) -> None:
    report = baseline.verdict("nothing", workers)
    assert report.same, report.text
    assert report.steps == STEPS[kind]


def require_found(baseline: Baseline, fault: str, workers: int) -> None:
    report = baseline.verdict(fault, workers)
    assert not report.same
    assert report.first_difference is not None
    assert report.first_difference.step == STEP
    assert FOUND[fault][0] in report.first_difference.tensor


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "workers"), [("variable", 3), ("resumed", 2)])
def test_nothing_is_found_without_an_injected_fault(baseline: Baseline, kind: str, workers: int) -> None:
    require_nothing_found(baseline, kind, workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "fault"), SAMPLE)
def test_an_injected_fault_is_found_and_its_step_named(baseline: Baseline, fault: str) -> None:
    require_found(baseline, fault, workers=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "workers"), [("variable", 2), ("resumed", 3)])
def test_nothing_is_found_on_other_numbers_of_workers(baseline: Baseline, kind: str, workers: int) -> None:
    require_nothing_found(baseline, kind, workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_every_injected_fault_is_found_and_its_step_named(baseline: Baseline, fault: str, workers: int) -> None:
    require_found(baseline, fault, workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("kind", "fault"), STOPPED)
def test_ranks_that_cannot_continue_raise_with_the_reason(
    baseline: Baseline, fault: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match=f"{workers} workers failed with exit code 1"):
        runs(fault).run_many(workers)
    assert "RanksDiverged" in capsys.readouterr().err
    assert baseline.one.finished


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_command_reports_the_fault_and_exits_with_1(baseline: Baseline, kind: str) -> None:
    for fault, code in (("nothing", 0), ("mean_of_means", 1)):
        words = ["verify", "-n", "3", "--devices", "cpu", "--seed", "1", "train.py", fault, "resumes"]
        job = rankless(*words, folder=baseline.folder)
        assert job.returncode == code, job.stdout + job.stderr
        expected = f"NOT the same training: first at step {STEP}, " if code else f"same training: {STEPS[kind]} steps"
        assert read_verdict(job.stdout).startswith(expected)
