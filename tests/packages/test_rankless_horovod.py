"""The distribution for other launchers: it is built, installed, used, and taken away again, as a user would."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from architecture.sources import ROOT

pytestmark = pytest.mark.slow

SAME = "import horovod.common, rankless.extensions.horovod.common as own; assert horovod.common is own; print('ours')"


def run(*words: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # What a plain environment has of Rankless is what its own path lends it.
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={**outside, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def printed(*words: str | Path, folder: Path, **environment: str) -> str:
    done = run(*words, folder=folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT / "packages/rankless-horovod", folder / "source")
    printed(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source"),
        folder=folder,
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages' folder of an environment that has Rankless and what it needs, by links to ours."""
    venv.create(tmp_path / "empty", with_pip=True)
    place = printed(
        tmp_path / "empty/bin/python",
        "-c",
        "import sysconfig; print(sysconfig.get_paths()['purelib'])",
        folder=tmp_path,
    )
    found = Path(place.strip())
    lent = Path(subprocess.__file__).parent / "site-packages"
    ours = [path for path in sys.path if path.endswith("site-packages") and Path(path) != lent]
    (found / "lent.pth").write_text("\n".join([str(ROOT), *ours, str(lent)]) + "\n")
    return found


def files_of(site: Path) -> set[str]:
    return {str(path.relative_to(site)) for path in site.rglob("*") if "__pycache__" not in path.parts}


def test_it_contains_one_pth_file_and_no_folder(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in names if ".dist-info/" not in name] == ["rankless_horovod.pth"]


@pytest.mark.exhaustive
def test_plain_python_finds_it_and_a_real_horovod_takes_precedence(wheel: Path, site: Path, tmp_path: Path):
    python = tmp_path / "empty/bin/python"
    install = (python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    before = files_of(site)
    assert "No module named 'horovod'" in run(python, "-c", SAME, folder=tmp_path).stderr
    printed(*install, wheel, folder=tmp_path)
    assert printed(python, "-c", SAME, folder=tmp_path) == "ours\n"
    assert printed(python, "-c", "import horovod.torch; print('there')", folder=tmp_path) == "there\n"
    loaded = "import sys; print([name for name in sys.modules if name.startswith('rankless')])"
    assert printed(python, "-c", loaded, folder=tmp_path) == "[]\n"

    real = tmp_path / "real/horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("where = 'the real one'\n")
    (real.parent / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "horovod"\nversion = "0.28.1"\n[tool.setuptools]\npackages = ["horovod"]\n'
    )
    printed(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, real.parent),
        folder=tmp_path,
    )
    (theirs,) = tmp_path.glob("horovod-*.whl")
    printed(*install, theirs, folder=tmp_path)
    where = "import horovod; print(getattr(horovod, 'where', 'ours'))"
    assert printed(python, "-c", where, folder=tmp_path) == "the real one\n"
    assert printed(python, "-c", where, folder=tmp_path, RANKLESS_HOROVOD="1") == "ours\n"

    printed(python, "-m", "pip", "uninstall", "--yes", "--quiet", "rankless-horovod", folder=tmp_path)
    assert printed(python, "-c", where, folder=tmp_path) == "the real one\n"
    printed(python, "-m", "pip", "uninstall", "--yes", "--quiet", "horovod", folder=tmp_path)
    assert files_of(site) == before


@pytest.mark.exhaustive
def test_without_rankless_it_does_nothing(wheel: Path, site: Path, tmp_path: Path):
    python = tmp_path / "empty/bin/python"
    printed(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel, folder=tmp_path)
    (site / "lent.pth").unlink()
    assert printed(python, "-c", "print('well')", folder=tmp_path) == "well\n"
    done = run(python, "-c", "import horovod", folder=tmp_path)
    assert "No module named 'horovod'" in done.stderr
    assert done.stderr.count("Error") == 1
