"""The tests of this folder need a GPU. Elsewhere they are skipped, and nothing of CUDA or NCCL is tested."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU"))
