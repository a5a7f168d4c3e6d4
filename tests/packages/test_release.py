"""What would be published: the metadata is valid and agrees, and each extra works in an empty environment."""

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from architecture.sources import ROOT
from packages.test_wheel import open_folder, quiet, wheel
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

from rankless.torch_versions import PINNED
from rankless.version import VERSION

__all__ = ["open_folder", "wheel"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the environments are for Linux")]

PACKAGES = sorted(path for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists())
EXTRAS = {
    "horovod": "import horovod.torch as hvd; hvd.init(); print(hvd.size())",
    "ps": "from rankless.parameter_server import Embedding; print(len([Embedding(2)]))",
    "examples": "import accelerate, lightning_fabric, sklearn, tqdm; print(1)",
}
"""A script for each extra, which needs its packages and prints 1."""


def read_metadata(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def test_the_metadata_of_the_wheel_is_complete(wheel: Path):
    found = read_metadata(wheel)
    assert (found.name, found.version) == ("rankless", Version(VERSION))
    assert found.license_expression == "Apache-2.0"
    assert found.license_files == ["LICENSE"]
    assert sorted(found.provides_extra or []) == sorted(EXTRAS)
    assert found.description == (ROOT / "README.md").read_text()
    assert found.description_content_type == "text/markdown"
    python = [text.rpartition(" ")[2] for text in found.classifiers or [] if text.startswith("Programming Language")]
    assert python == ["Only", "3.11", "3.12", "3.13"]
    assert found.summary
    assert found.keywords


def test_all_packages_have_one_version_and_one_license():
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in PACKAGES:
        assert tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"] == VERSION
        assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert [Requirement(text) for text in own["optional-dependencies"]["horovod"]] == [
        Requirement(f"rankless-horovod=={VERSION}")
    ]


@pytest.fixture(scope="module")
def built(open_folder: Path) -> Path:
    """A folder with the source archives and the wheels of all packages, each wheel built from its archive."""
    target = open_folder / "release"
    for source in (ROOT, *PACKAGES):
        copied = open_folder / source.name
        quiet("git", "clone", "--quiet", ROOT, copied) if source == ROOT else quiet("cp", "-r", source, copied)
        quiet(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, copied)
    return target


@pytest.mark.exhaustive
def test_the_source_archive_builds_the_same_package(built: Path):
    (archive,), (package,) = built.glob("rankless-*.tar.gz"), built.glob("rankless-*.whl")
    with zipfile.ZipFile(package) as wheel_file, tarfile.open(archive) as sources:
        modules = {name for name in wheel_file.namelist() if name.startswith("rankless/")}
        packed = {name.partition("/")[2] for name in sources.getnames()}
    tracked = subprocess.run(["git", "ls-files", "rankless"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert modules == {
        name for name in tracked.stdout.splitlines() if name.endswith((".py", "py.typed", "extension.toml"))
    }
    assert modules <= packed


@pytest.mark.exhaustive
def test_twine_accepts_the_files(built: Path, open_folder: Path):
    quiet(sys.executable, "-m", "venv", open_folder / "twine")
    quiet(open_folder / "twine/bin/python", "-m", "pip", "install", "--quiet", "twine==7.0.0")
    checked = quiet(open_folder / "twine/bin/twine", "check", "--strict", *sorted(built.iterdir()))
    assert checked.count("PASSED") == 2 + 2 * len(PACKAGES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_works_in_an_empty_environment(extra: str, built: Path, open_folder: Path):
    environment = open_folder / f"with-{extra}"
    quiet(sys.executable, "-m", "venv", environment)
    pip = (environment / "bin/python", "-m", "pip", "install", "--quiet", "--find-links", built)
    quiet(*pip, f"torch=={PINNED}")
    (package,) = built.glob("rankless-*.whl")
    quiet(*pip, f"{package}[{extra}]")
    assert quiet(environment / "bin/python", "-c", EXTRAS[extra]).split()[-1] == "1"
    shown = quiet(environment / "bin/python", "-m", "pip", "show", "--verbose", "rankless")
    assert email.message_from_string(shown)["Version"] == VERSION
