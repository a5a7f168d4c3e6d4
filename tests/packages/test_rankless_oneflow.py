"""The distribution with OneFlow's API: it is built, installed, used, and taken away again, as a user would."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from packages.test_rankless_horovod import files_of, printed, run, site
from support.oneflow import PACKAGE

__all__ = ["site"]  # a fixture

pytestmark = pytest.mark.slow

SAME = "import oneflow.typing, rankless_oneflow.typing as own; assert oneflow.typing is own; print('ours')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(PACKAGE, folder / "source")
    printed(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source"),
        folder=folder,
    )
    (found,) = folder.glob("*.whl")
    return found


def test_it_contains_its_package_and_no_folder_oneflow(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = PACKAGE / "source"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".toml", ".pth")}
    assert names == wanted
    assert not any(name.startswith("oneflow/") for name in names)


def test_it_has_at_most_fifteen_hundred_lines():
    lines = sum(len(path.read_text().splitlines()) for path in (PACKAGE / "source").rglob("*.py"))
    assert lines <= 1500


@pytest.mark.exhaustive
def test_plain_python_finds_it_and_a_real_oneflow_takes_precedence(wheel: Path, site: Path, tmp_path: Path):
    python = tmp_path / "empty/bin/python"
    install = (python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    before = files_of(site)
    assert "No module named 'oneflow'" in run(python, "-c", SAME, folder=tmp_path).stderr
    printed(*install, wheel, folder=tmp_path)
    assert printed(python, "-c", SAME, folder=tmp_path) == "ours\n"
    refused = run(python, "-c", "import oneflow.compatible.single_client", folder=tmp_path).stderr
    assert "No module named 'oneflow.compatible'" in refused
    assert "rankless-oneflow has what OneFlow's pages" in refused
    loaded = "import sys; print([name for name in sys.modules if name.startswith('rankless')])"
    assert printed(python, "-c", loaded, folder=tmp_path) == "[]\n"

    real = tmp_path / "real/oneflow"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("where = 'the real one'\n")
    (real.parent / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "oneflow"\nversion = "0.9.0"\n[tool.setuptools]\npackages = ["oneflow"]\n'
    )
    printed(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, real.parent),
        folder=tmp_path,
    )
    (theirs,) = tmp_path.glob("oneflow-*.whl")
    printed(*install, theirs, folder=tmp_path)
    where = "import oneflow; print('ours' if oneflow.__name__ == 'rankless_oneflow' else oneflow.where)"
    assert printed(python, "-c", where, folder=tmp_path) == "the real one\n"
    assert printed(python, "-c", where, folder=tmp_path, RANKLESS_ONEFLOW="1") == "ours\n"

    printed(python, "-m", "pip", "uninstall", "--yes", "--quiet", "rankless-oneflow", folder=tmp_path)
    assert printed(python, "-c", where, folder=tmp_path) == "the real one\n"
    printed(python, "-m", "pip", "uninstall", "--yes", "--quiet", "oneflow", folder=tmp_path)
    assert files_of(site) == before


@pytest.mark.exhaustive
def test_without_rankless_it_does_nothing(wheel: Path, site: Path, tmp_path: Path):
    python = tmp_path / "empty/bin/python"
    printed(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel, folder=tmp_path)
    (site / "lent.pth").unlink()
    assert printed(python, "-c", "print('well')", folder=tmp_path) == "well\n"
    assert "No module named 'oneflow'" in run(python, "-c", "import oneflow", folder=tmp_path).stderr
