"""The wheel of `pip wheel .` works outside the repository, without root, with a read-only home."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.sources import ROOT

from rankless.version import VERSION

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the environment is made for Linux")]

NOBODY = 65534
SCRIPT = """
import torch, rankless
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

rows = torch.utils.data.TensorDataset(torch.randn(10, 3))
for (batch,) in rankless.loader(rows, batch_size=4):
    loss = train(batch)
print(f"loss {loss.item():.4f} in {rankless.__file__}")
"""


class Installed:
    """An environment with the wheel, and a user who may write to one folder only."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.python = python
        self.work = folder / "work"
        self.home = folder / "home"
        for made in (self.work, self.home):
            made.mkdir()
        (self.work / "train.py").write_text(SCRIPT)
        self.home.chmod(0o555)
        if os.geteuid() == 0:
            os.chown(self.work, NOBODY, NOBODY)

    def run(self, *command: str) -> str:
        """Return what a command prints. The user cannot write to the home, the environment or the repository."""
        environment = {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "HOME": str(self.home), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*without_root(), str(self.python.parent / command[0]), *command[1:]],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def without_root() -> list[str]:
    """Run a command as nobody, who may read what root may read: interpreters may lie in root's home."""
    if os.geteuid() != 0:
        return []
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return ["setpriv", *user, "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]


def quiet(*command: object, **options: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="rankless-wheel-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def wheel(open_folder: Path) -> Path:
    """The wheel of a copy: setuptools leaves a build folder, whose old files would pass for new ones."""
    source = open_folder / "source"
    shutil.copytree(ROOT / "rankless", source / "rankless", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = open_folder / "dist"
    quiet(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", target, cwd=str(source))
    (built,) = target.glob("rankless-*.whl")
    return built


def interpreter(version: str) -> str:
    """The path of a Python of this version; skips the test if the machine has none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    places = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), Path(f"/usr/bin/python{version}")]
    found = next((str(place) for place in places if place.exists()), None)
    if found is None:
        pytest.skip(f"this machine has no Python {version}")
    return found


def install(wheel: Path, environment: Path, python: str) -> None:
    """Install the wheel: with its dependencies, or, in our own version of Python, beside links to ours."""
    quiet(python, "-m", "venv", environment)
    pip = [environment / "bin/python", "-m", "pip", "install", "--quiet"]
    if python != sys.executable:
        quiet(*pip, "torch==2.13.0")
        quiet(*pip, wheel)
        return
    quiet(*pip, "--no-deps", "--no-index", wheel)
    site = Path(
        quiet(environment / "bin/python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    )
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "rankless" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "version",
    [
        ".".join(map(str, sys.version_info[:2])),
        *(pytest.param(v, marks=pytest.mark.exhaustive) for v in ("3.12", "3.13")),
    ],
)
def test_the_wheel_runs_and_verifies_without_root_and_with_a_read_only_home(
    version: str, wheel: Path, open_folder: Path
):
    environment = open_folder / f"python{version}"
    install(wheel, environment, interpreter(version))
    (folder := open_folder / f"user{version}").mkdir()
    installed = Installed(folder, environment / "bin/python")
    assert installed.run("rankless", "--version").strip() == f"rankless {VERSION}"
    assert "verify" in installed.run("rankless", "--help")
    assert "healthy" in (verdict := installed.run("rankless", "doctor", "--quick")) or "warning" in verdict
    alone = installed.run("python", "train.py")
    assert str(environment) in alone
    assert installed.run("rankless", "run", "--no-progress", "-n", "2", "train.py") == alone
    assert "same training: " in installed.run("rankless", "verify", "-n", "2", "train.py")
    assert not list(installed.home.iterdir())
    (package,) = environment.glob("lib/python*/site-packages/rankless")
    assert (package / "py.typed").is_file()
    assert not list(package.rglob("tests"))
