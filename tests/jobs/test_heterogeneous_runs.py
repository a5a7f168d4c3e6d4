"""Runs with heterogeneous workers, which compute the dense part of a model: the training of one device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT, FORMS = SCRIPTS / "train_heterogeneously.py", SCRIPTS / "train_tables.py"
SIZES: dict[str, tuple[str, ...]] = {
    "3 and 2": ("--servers", "2", "--workers", "3", "--heter-workers", "2"),
    "1 and 3": ("--servers", "1", "--workers", "1", "--heter-workers", "3"),
    "4 and 1": ("--servers", "2", "--workers", "4", "--heter-workers", "1"),
    "without servers": ("--workers", "2", "--heter-workers", "1"),
}
WHOLE_BATCH = {"in-batch negatives", "batch norm", "a batch-wide sum"}
"""Forms that need all samples in the middle of the model."""

pytestmark = pytest.mark.slow


def read_numbers(output: str) -> list[float]:
    return json.loads(next(line for line in output.splitlines() if re.match(r"\[-?\d+\.\d", line)))  # no warning


def run_plainly(*command: str) -> str:
    return subprocess.run((sys.executable, *command), capture_output=True, text=True, check=True).stdout


CASES = [
    ("read_loss", "3 and 2", 20),
    ("look_up_later", "1 and 3", 20),
    ("look_up_all", "without servers", 20),
    ("return_scores", "4 and 1", 7),
    ("mean_error", "3 and 2", 1),
    ("mean_error", "1 and 3", 2),
    ("ignore_some", "3 and 2", 20),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "size", "rows"), CASES)
def test_workers_of_two_kinds_train_as_one_device(tmp_path, case, size, rows):
    wanted = read_numbers(run_plainly(str(SCRIPT), case, "--rows", str(rows)))
    done = rankless("run", *SIZES[size], "-q", str(SCRIPT), case, "--rows", str(rows), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(wanted) > 180
    assert read_numbers(done.stdout) == pytest.approx(wanted, rel=1e-11, abs=1e-11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        ("momentum", "3 and 2"),
        ("sparse_adam", "1 and 3"),
        ("sgd", "4 and 1"),
        ("adagrad", "without servers"),
    ],
)
def test_every_form_of_a_lookup_trains_or_is_refused(tmp_path, optimizer, size, part):
    def read(output):
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {line["form"]: line for line in lines}

    script = (str(FORMS), "--optimizer", optimizer, "--part", str(part), "--parts", "4")
    wanted = read(run_plainly(*script, "--plain"))
    done = rankless("run", *SIZES[size], "-q", *script, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(done.stdout)
    assert {form for form, line in found.items() if "refused" in line} == WHOLE_BATCH & wanted.keys()
    assert len(found) == len(wanted) > 5
    for form in wanted.keys() - WHOLE_BATCH:
        numbers = [*wanted[form]["losses"], *wanted[form]["rows"]]
        assert [*found[form]["losses"], *found[form]["rows"]] == pytest.approx(numbers, rel=0, abs=1e-11), form


REFUSED = [
    (("look_up_by_score",), "a lookup in it, or one whose ids follow from it"),
    (("normalize",), "which needs the whole batch"),
    (("mean_error", "--unmarked"), "no module that is marked as dense"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("words", "found"), REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_with_the_line(tmp_path, words, found):
    done = rankless("run", *SIZES["without servers"], "-q", str(SCRIPT), *words, folder=tmp_path)
    assert done.returncode == 1
    assert found in done.stderr
    assert f"{SCRIPT}:" in done.stderr


@pytest.mark.exhaustive
def test_verify_calls_two_kinds_of_workers_the_same_training(tmp_path):
    done = rankless("verify", *SIZES["3 and 2"], str(SCRIPT), "mean_error", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("same training: ")
