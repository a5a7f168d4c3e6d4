"""PyTorch's own random generators, one per device."""

import torch


def find_default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which operators on a device draw."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
