"""One module knows the versions of PyTorch: it agrees with the packaging, the docs and the doctor."""

import re
import tomllib

import pytest
import torch.distributed as dist
from architecture.sources import ROOT
from torch.utils import checkpoint

from rankless.launch.doctor import machine_checks
from rankless.torch_versions import (
    OLDER_NAMES,
    PINNED,
    SUPPORTED,
    find_function,
    find_objection,
    find_objection_to_python_groups,
)


def test_the_supported_versions_are_those_that_pip_accepts_and_the_docs_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = SUPPORTED[-1].split(".")
    assert f"torch>={SUPPORTED[0]},<{major}.{int(minor) + 1}" in project["dependencies"]
    assert f"install --quiet torch=={PINNED}" in (ROOT / "Makefile").read_text()
    named = rf"PyTorch (2\.13\D{{1,3}})?{SUPPORTED[0]}\D{{1,5}}{re.escape(SUPPORTED[-1])}"
    for page in ("README.md", "README.zh-CN.md", "docs/installation.md"):
        assert re.search(named, (ROOT / page).read_text()), page


@pytest.mark.parametrize(
    ("version", "objection"),
    [
        ("2.11.0", ""),
        ("2.13.0+cpu", ""),
        ("2.15.1+cu130", ""),
        ("2.10.1", "older than 2.11, the first supported version"),
        ("2.16.0.dev20261101", "newer than 2.15, the last tested version"),
        ("3.0", "newer than 2.15, the last tested version"),
        ("", "PyTorch is not installed"),
    ],
)
def test_the_doctor_names_the_version_and_its_support(version: str, objection: str, monkeypatch: pytest.MonkeyPatch):
    assert find_objection(version) == objection
    monkeypatch.setattr(machine_checks, "find_torch_version", lambda: version)
    found = machine_checks.check_torch()
    assert found.status == ("pass" if not objection else "warn" if version else "fail")
    assert found.seen.startswith(f"{version}: " if version else objection)


def test_shared_memory_needs_a_version_with_process_groups_in_python():
    assert find_objection_to_python_groups("2.13.0") == find_objection_to_python_groups("2.15.0") == ""
    assert find_objection_to_python_groups("2.12.1") == "it needs PyTorch 2.13 or newer, and this is 2.12.1"


def test_renamed_functions_are_found_in_every_version():
    class Older:
        all_gather_into_tensor, reduce_scatter_tensor = "gathers", "scatters"
        _checkpoint_without_reentrant_generator = "runs"

    assert [find_function(Older, name) for name in OLDER_NAMES] == ["gathers", "scatters", "runs"]
    modules = [checkpoint if "checkpoint" in name else dist for name in OLDER_NAMES]
    assert all(callable(find_function(module, name)) for module, name in zip(modules, OLDER_NAMES, strict=True))
