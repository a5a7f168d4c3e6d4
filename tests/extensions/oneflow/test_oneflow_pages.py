"""The complete scripts of OneFlow's page on its two views run word for word; and ours in the same form.

The page is not part of the project: where it is not at hand, its scripts are not run.
"""

import re
import subprocess
from pathlib import Path

import pytest
from support.oneflow import ROOT, read_page_scripts

SCRIPTS = read_page_scripts()
pytestmark = pytest.mark.slow


def run(python: Path, folder: Path, *words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.exhaustive
@pytest.mark.skipif(not SCRIPTS, reason="OneFlow's page is not at hand")
@pytest.mark.parametrize("view", ["mirrored", pytest.param("consistent", marks=pytest.mark.exhaustive)])
def test_the_scripts_of_oneflows_page_run_word_for_word(view: str, oneflow_python: Path, tmp_path: Path):
    assert sorted(SCRIPTS) == ["consistent", "mirrored"]
    (tmp_path / "train.py").write_text(SCRIPTS[view])
    done = run(oneflow_python, tmp_path, "train.py", seconds=800)
    assert "2 workers" in done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == (1 if view == "mirrored" else 50)
    assert 2 < losses[0] < 8
    assert view == "mirrored" or losses[-1] < 0.2


@pytest.mark.exhaustive
def test_lenet_in_oneflows_style_learns_on_one_device_and_on_two(oneflow_python: Path, tmp_path: Path):
    script = str(ROOT / "examples/oneflow/lenet.py")
    for devices in ("1", "2"):
        done = run(oneflow_python, tmp_path, script, "--devices", devices, seconds=400)
        assert ("2 workers" in done.stderr) == (devices == "2")
        assert float(re.findall(r"test accuracy ([\d.]+)%", done.stdout)[0]) > 90
    assert (tmp_path / "lenet").is_dir()


@pytest.mark.exhaustive
def test_the_mlp_in_the_mirrored_view_learns(oneflow_python: Path, tmp_path: Path):
    done = run(oneflow_python, tmp_path, str(ROOT / "examples/oneflow/mlp.py"), seconds=400)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.3
