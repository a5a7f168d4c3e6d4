"""Jobs that ask servers for the rows of the next batch: the same training, whatever the script does in between."""

import itertools
import json
from pathlib import Path

import pytest
from support.warm_process import run_warm
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/train_early_rows.py"
PARTS = 4
RUNS = [
    ("--servers", "1", "--workers", "2"),
    ("--servers", "2", "--workers", "3"),
    ("--servers", "2", "--workers", "2", "--copies", "1"),
    ("--servers", "2", "--workers", "4", "--min-workers", "4"),
]
CASES = list(itertools.product(RUNS, range(PARTS)))

USED = {
    # Of 7 batches in a pass, the last one has fewer samples, and nothing is known before the first.
    "plain_loop": 5 + 5 + 5,
    "reader_processes": 5 + 5 + 5,
    "dicts_of_readers": 5 + 5,
    "two_jobs_with_the_same_batch": 5 + 5 + 5,
    "an_iterator_across_loops": 8,
    "samples_with_replacement": 0,
    "one_batch_per_pass": 0,
}
"""How many calls use rows of both tables that were asked for early; one less after a process has begun."""


def read_forms(output: str) -> dict[str, dict]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["form"]: line for line in lines}


def require_same_training(folder: Path, options: tuple[str, ...], *words: str) -> int:
    """Check that workers train in each form what plain PyTorch does, with rows that came early. Return how many."""
    done = rankless("run", *options, "--no-progress", str(SCRIPT), *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = read_forms(run_warm(SCRIPT, *words, "--plain")), read_forms(done.stdout)
    assert list(found) == list(wanted)
    for form, line in wanted.items():
        assert found[form]["numbers"] == pytest.approx(line["numbers"], rel=0, abs=1e-12), form
        assert line["used"] == 0
        if form in USED:
            assert found[form]["used"] in (2 * USED[form], max(0, 2 * USED[form] - 2)), form
    return len(wanted)


@pytest.mark.slow
def test_rows_of_the_next_batch_come_early_where_it_is_known(tmp_path):
    forms = "plain_loop,two_jobs_with_the_same_batch,samples_with_replacement"
    assert require_same_training(tmp_path, RUNS[0], "--forms", forms) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("options", "part"), CASES)
def test_every_form_of_a_loop_is_the_same_training(tmp_path, options, part):
    assert require_same_training(tmp_path, options, "--part", str(part), "--parts", str(PARTS)) >= 7
