"""In a run with heterogeneous workers, those on the CPU alone read samples. It is the training of one device."""

import json
from pathlib import Path

import pytest
from support.warm_process import run_warm
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/read_on_cpu_workers.py"
OTHER_READING = ("replicated", "from_first_rank")
"""Cases whose loader has another `reading`, with other numbers of samples that workers read."""

TWO_LOADERS = ("resume", "single_samples", "accumulate", "look_up", "save_and_load")

pytestmark = pytest.mark.slow


def read_cases(folder: Path, rank: object) -> dict[str, dict]:
    lines = (folder / f"rank-{rank}").read_text().splitlines()
    return {line["case"]: line for line in map(json.loads, lines)}


def run_plainly(folder: Path, *options: str) -> dict[str, dict]:
    run_warm(SCRIPT, folder, *options)
    return read_cases(folder, "plain")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, dict]:
    return run_plainly(tmp_path_factory.mktemp("plain"))


def count_reads(plain: dict[str, dict], case: str) -> int:
    """Return how many samples a rank reads itself: those of the plain script, and twice one that all ranks compare."""
    loaders = 2 if case in TWO_LOADERS else 1
    own = plain[case]["reads"]  # none where reader processes read
    return own + 2 * loaders if own else 0


def require_same(found: dict[str, dict], wanted: dict[str, dict], rank: int) -> None:
    assert list(found) == list(wanted)
    for case, line in wanted.items():
        assert found[case]["numbers"] == pytest.approx(line["numbers"], rel=1e-11, abs=1e-11), (rank, case)


@pytest.mark.parametrize(
    ("workers", "heterogeneous", "cases"),
    [
        (2, 1, "replicated,odd_batches,use_outside_jobs"),
        pytest.param(2, 2, "", marks=pytest.mark.exhaustive),
        pytest.param(1, 3, "", marks=pytest.mark.exhaustive),
        pytest.param(3, 1, "", marks=pytest.mark.exhaustive),
    ],
)
def test_all_workers_train_as_one_device_and_some_read_nothing(tmp_path, workers, heterogeneous, cases):
    options = ("--workers", str(workers), "--heter-workers", str(heterogeneous), "-q")
    chosen = ("--cases", cases) if cases else ()
    plain = run_plainly(tmp_path, *chosen)
    done = rankless("run", *options, str(SCRIPT), str(tmp_path), *chosen, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(workers + heterogeneous):
        found = read_cases(tmp_path, rank)
        require_same(found, plain, rank)
        for case in plain.keys() - set(OTHER_READING):
            assert found[case]["reads"] == (count_reads(plain, case) if rank < workers else 0), (rank, case)
        assert found["replicated"]["reads"] == count_reads(plain, "replicated")
    assert f"{SCRIPT.name}:" in done.stderr
    assert "Tensor.mul_ outside a job sends the whole tensor to the heterogeneous workers" in done.stderr


REFUSED = {
    "opaque_values": ("found:    a __main__.Opaque", 'pass reading="replicated"'),
    "damaged_sample": ("ValueError: sample 17 is damaged (index 17)", "correct the data set"),
    "read_in_closure": ("a batch that a job reads from its closure", "pass it to the job as an argument"),
    "read_on_one_rank": ("rank 0 reached an operation on a whole batch", "let every rank make the same calls"),
}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_for_others_is_refused_with_the_line(tmp_path, case):
    options = ("--workers", "2", "--heter-workers", "1", "-q")
    done = rankless("run", *options, str(SCRIPT), str(tmp_path), "--cases", case, folder=tmp_path)
    assert done.returncode == 1
    assert all(text in done.stdout + done.stderr for text in REFUSED[case]), done.stdout + done.stderr
    assert f"{SCRIPT.name}:" in done.stderr


@pytest.mark.exhaustive
def test_the_first_rank_reads_for_all_in_a_pipeline(tmp_path, plain):
    line = ("run", "--mesh", "pipeline=2", "-q", str(SCRIPT), str(tmp_path), "--cases", "from_first_rank")
    done = rankless(*line, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        require_same(read_cases(tmp_path, rank), {"from_first_rank": plain["from_first_rank"]}, rank)


@pytest.mark.exhaustive
def test_verify_calls_it_the_same_training(tmp_path):
    options = ("--workers", "2", "--heter-workers", "2", str(SCRIPT), str(tmp_path), "--cases", "use_outside_jobs")
    done = rankless("verify", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("same training: ")
