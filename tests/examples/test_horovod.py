"""Scripts of Horovod run unchanged under `rankless horovodrun`."""

import re
from pathlib import Path

import pytest
from support.jobs import rankless

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "examples" / "horovod"
OUT = re.compile(r"^\[(\d+)\]<stdout>: ?(.*)$", re.MULTILINE)


def horovodrun(count: int, script: str, *arguments: str, folder: Path) -> list[str]:
    """Run a script and return the lines that rank 0 prints."""
    words = ("horovodrun", "-np", str(count), "python", str(SCRIPTS / script), *arguments)
    done = rankless(*words, folder=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = OUT.findall(done.stdout)
    assert {rank for rank, text in lines if text} == {"0"}
    return [text for _, text in lines]


def last_number(lines: list[str], pattern: str) -> float:
    return float([match.group(1) for line in lines if (match := re.search(pattern, line))][-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_usual_loop_trains(count: int, tmp_path: Path):
    lines = horovodrun(count, "loop.py", folder=tmp_path)
    assert f"equal on all {count} processes: True" in lines
    assert last_number(lines, r"accuracy: ([\d.]+)") > 0.95


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        ("--fp16-allreduce",),
        pytest.param((), marks=pytest.mark.exhaustive),
        pytest.param(("--use-adasum",), marks=pytest.mark.exhaustive),
        pytest.param(("--gradient-predivide-factor", "2.0"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_convolutional_network_trains(options: tuple[str, ...], tmp_path: Path):
    lines = horovodrun(2, "digits_cnn.py", *options, folder=tmp_path)
    assert last_number(lines, r"Accuracy: ([\d.]+)%") > 90.0


@pytest.mark.exhaustive
def test_a_transformer_with_compression_and_several_passes_trains(tmp_path: Path):
    lines = horovodrun(2, "transformer.py", folder=tmp_path)
    assert last_number(lines, r"step 0: loss ([\d.]+)") > 3.0
    assert last_number(lines, r"loss ([\d.]+)") < 1.0


@pytest.mark.exhaustive
def test_process_sets_train_models_of_their_own(tmp_path: Path):
    lines = horovodrun(4, "process_sets.py", folder=tmp_path)
    assert lines == ["ranks [0, 2] learnt +1.00, equal: True", "ranks [1, 3] learnt -1.00, equal: True"]
