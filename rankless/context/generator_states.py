"""The states of PyTorch's default generators, on all devices."""

import torch
from torch import Tensor

GeneratorStates = tuple[Tensor, list[Tensor]]
"""The state of the CPU's generator, and of each GPU's."""


def save_generators() -> GeneratorStates:
    """Return the states of all default generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def restore_generators(states: GeneratorStates) -> None:
    """Set the states of all default generators."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
