"""The device on which tests of the compiler, jobs and optimizer states compute, if they name none.

`RANKLESS_TEST_DEVICE=cuda` runs them on a GPU, and their oracle too. Workers of `support.processes` then share it.
"""

import os

import torch

from rankless.parallel.default_generator import find_default_generator

DEVICE = torch.device(os.environ.get("RANKLESS_TEST_DEVICE", "cpu"))


def use_test_device() -> None:
    """Make new tensors of this process lie on `DEVICE`."""
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)


def get_random_state() -> torch.Tensor:
    """Return the state of the generator of `DEVICE`."""
    return find_default_generator(DEVICE).get_state()


def set_random_state(state: torch.Tensor) -> None:
    """Set the state of the generator of `DEVICE`."""
    find_default_generator(DEVICE).set_state(state)
