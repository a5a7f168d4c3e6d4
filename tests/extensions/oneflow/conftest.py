"""Finds rankless-oneflow in the repository, and gives each test a session of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.oneflow import PACKAGE, make_environment

sys.path.insert(0, str(PACKAGE / "source"))

from rankless_oneflow.session import reset_session  # the folder is on the path now


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    reset_session()
    yield
    reset_session()


@pytest.fixture(scope="session")
def oneflow_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which `import oneflow` means rankless-oneflow."""
    return make_environment(tmp_path_factory.mktemp("oneflow") / "environment")
