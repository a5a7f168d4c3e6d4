"""Process groups in shared memory need PyTorch 2.13: with an older version their tests are skipped."""

from pathlib import Path

import pytest

from rankless.torch_versions import find_objection_to_python_groups, find_torch_version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests where the installed PyTorch has no such groups."""
    objection = find_objection_to_python_groups(find_torch_version())
    for item in items:
        if objection and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"shared memory: {objection}"))
