"""The states of random generators: PyTorch's own on all devices, and those that a program draws from besides."""

from collections.abc import Iterable

import torch
from torch import Tensor

GeneratorStates = list[tuple[torch.Generator, Tensor]]


def save_generators(others: Iterable[torch.Generator] = ()) -> GeneratorStates:
    """Return the states of all default generators, and of others."""
    on_devices = torch.cuda.default_generators if torch.cuda.is_available() else ()
    return [(item, item.get_state()) for item in (torch.default_generator, *on_devices, *others)]


def restore_generators(states: GeneratorStates) -> None:
    """Set the states of generators."""
    for generator, state in states:
        generator.set_state(state)
