"""Scripts whose processes differ: each trains as one device, or is refused with the line and what differs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_runs import rankless

SCRIPTS = Path(__file__).with_name("unequal")
EQUAL = (
    *("clock_noise", "clock_rate", "clock_seed", "clock_stop", "clock_in_data", "date_seed", "date_text_seed"),
    *("urandom_noise", "urandom_seed", "secrets_rate", "uuid_seed", "entropy_in_data"),
    *("random_reseeded", "random_unseeded", "numpy_reseeded", "numpy_unseeded", "torch_seed", "torch_generator_seed"),
    *("pid_rate", "pid_seed", "hostname_seed", "environment_rate", "environment_seed", "environment_share"),
    *("file_order", "set_order"),
)
"""These read a source that is equal on all ranks, or differ in what changes no number."""
SEED = "the seed of torch.manual_seed"
NAMED = {
    "process_file_rate": r"the settings of SGD \[\[\('lr', 0\.01\).*the settings of SGD",
    "process_file_seed": SEED,
    "port_seed": SEED,
    "temporary_name_seed": SEED,
    "thread_order": SEED,
    "object_order": "parameter 0 of SGD",
    "weight_noise": "parameter 0 of SGD",
    "thread_draws": "random numbers of torch",
    "memory_batch": "the batch, with indices",
    "uneven_reads": r"rank 0: .*; rank 1: double\(float64\[\]\)",
    "uneven_steps": "reached a pass over a DataLoader|the batch|backward pass|the end of the script",
    "uneven_epochs": "reached the end of the script",
    "uneven_files": r"reached open odd\.txt to write \(uneven_files\.py:\d+\)",
    "error_on_one": "ValueError: only on some ranks",
    "input_noise": r"rank 0: input_noise\.py:5: a tensor for add",
    "number_in_loss": r"rank 0: mul\(float64\[6, 4\], 1\.0",
}
"""What the error of each must contain."""


def read_output(text: str) -> tuple[list[object], list[str]]:
    """Return the values that a script has printed, and its other lines."""
    lines = text.splitlines()
    values = [json.loads(line.removeprefix("value ")) for line in lines if line.startswith("value ")]
    return values, [line for line in lines if not line.startswith("value ")]


def test_every_script_has_an_expectation():
    names = {path.stem for path in SCRIPTS.glob("*.py")} - {"training"}
    assert names == {*EQUAL, *NAMED}
    assert len(names) >= 30


@pytest.mark.slow
@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", EQUAL)
def test_sources_that_ranks_share_train_as_one_device(name, tmp_path):
    done = rankless("run", "--logical", "-n", "2", "--quiet", str(SCRIPTS / f"{name}.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = [read_output(path.read_text()) for path in sorted(tmp_path.glob("log/2*/rank*.log"))]
    assert outputs[0][1] == outputs[1][1], "the ranks see the same numbers"
    values, lines = outputs[0]
    fixed = {"FIXED": json.dumps(values[-1]), "PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py")],
        cwd=tmp_path,
        env=job_environment(fixed),
        capture_output=True,
        text=True,
        check=True,
    )
    assert read_output(plain.stdout)[1] == lines


@pytest.mark.slow
@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", NAMED)
def test_other_differences_are_named(name, tmp_path):
    done = rankless("run", "--logical", "-n", "2", "--quiet", str(SCRIPTS / f"{name}.py"), folder=tmp_path)
    assert done.returncode == 1, done.stdout
    assert re.search(NAMED[name], done.stderr), done.stderr
    assert re.search(rf"({name}|training)\.py:\d+", done.stderr)


@pytest.mark.exhaustive
def test_two_runs_draw_different_entropy_unless_they_have_a_seed(tmp_path):
    def draw(*options: str) -> list[object]:
        script = str(SCRIPTS / "urandom_seed.py")
        done = rankless("run", "--logical", "-n", "2", "--quiet", *options, script, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return read_output(done.stdout)[0]

    assert draw("--seed", "4") == draw("--seed", "4")
    assert draw() != draw()
