"""Perturbations of gradients and parameters in their last bit, which measure the noise floor of `rankless verify`.

# Note [noise floor]: how far may two right runs be apart? The run on one worker is repeated with
# parameters, in forward and backward, and gradients disturbed in their last bits: Monte Carlo arithmetic
# (Parker, 1997). Gradients alone would not do: one that is zero but for rounding, as a bias's before batch
# norm, is another number in every order of summation, and adaptive optimizers make whole steps of it.
# Parameters that are disturbed show that.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def perturb_gradients(gradients: Iterable[Tensor], generator: torch.Generator) -> None:
    """Change gradients in their last bits, in place: elements by up to eps(dtype) x the tensor's largest."""
    for gradient in gradients:
        if gradient.is_floating_point() and gradient.numel() > 0:
            scale = gradient.abs().amax() * torch.finfo(gradient.dtype).eps
            gradient.add_(_uniform(gradient, generator) * scale)


@contextlib.contextmanager
def perturbed_parameters(parameters: Iterable[Tensor], generator: torch.Generator) -> Iterator[None]:
    """Within: parameters off by up to one last bit each, for forward and backward. After: as they were.

    Gradients that were taken within stay; whatever else changed the parameters within is undone.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for parameter in parameters:
            if parameter.is_floating_point():
                originals.append((parameter, parameter.clone()))
                eps = torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + _uniform(parameter, generator) * eps)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, original in originals:
                parameter.copy_(original)


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers in [-1, 1) in a tensor's shape and dtype, drawn on the CPU: the same for every device."""
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return drawn.to(device=like.device, dtype=like.dtype)
