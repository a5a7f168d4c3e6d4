import pytest
import torch


@pytest.fixture(autouse=True)
def host_memory():
    """Make tensors on the CPU: tables without PyTorch have no other device."""
    with torch.device("cpu"):
        yield
