"""The built wheel works in an environment of its own, from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from architecture.sources import ROOT

from rankless.version import VERSION

SOLO_JOB = """
import torch, rankless
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

first, second = (train(torch.ones(4, 3)).item() for _ in range(2))
assert second < first, (first, second)
assert "dependencies" not in rankless.__file__
print("trained", rankless.__file__)
"""


@pytest.mark.slow
def test_the_wheel_installs_and_trains_in_an_empty_environment(tmp_path: Path):
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wheel = build_wheel(tmp_path, run)
    venv.create(tmp_path / "empty", with_pip=True)
    python, tool = tmp_path / "empty/bin/python", tmp_path / "empty/bin/rankless"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (site / "lent.pth").write_text(str(lend_dependencies(tmp_path)))
    assert run(tool, "--version").strip() == f"rankless {VERSION}"
    assert "verify" in run(tool, "--help")
    (tmp_path / "solo.py").write_text(SOLO_JOB)
    assert str(site) in run(python, "solo.py")
    assert (site / "rankless/py.typed").is_file()


def build_wheel(folder: Path, run: Callable[..., str]) -> Path:
    """Build from a copy: setuptools leaves a build folder, whose old files would pass for new ones."""
    source = folder / "source"
    shutil.copytree(ROOT / "rankless", source / "rankless", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", source)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def lend_dependencies(folder: Path) -> Path:
    """Our own environment's packages by links, without the editable install that would hide what a wheel lacks."""
    lent = folder / "dependencies"
    lent.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "rankless" not in entry.name and entry.suffix != ".pth":
            (lent / entry.name).symlink_to(entry)
    return lent
