"""PyTorch's own random generators, one per device, and the states of generators."""

from collections.abc import Iterable

import torch
from torch import Tensor


def find_default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which operators on a device draw."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


GeneratorStates = list[tuple[torch.Generator, Tensor]]


def save_generators(others: Iterable[torch.Generator] = ()) -> GeneratorStates:
    """Return the states of all default generators, and of others."""
    on_devices = torch.cuda.default_generators if torch.cuda.is_available() else ()
    return [(item, item.get_state()) for item in (torch.default_generator, *on_devices, *others)]


def restore_generators(states: GeneratorStates) -> None:
    """Set the states of generators."""
    for generator, state in states:
        generator.set_state(state)
