"""Perturb gradients and parameters in their last bit, to measure the noise floor of `rankless verify`.

Note [noise floor]: how far may two correct runs differ? `verify` repeats the run on one worker with perturbed
parameters, in forward and backward, and perturbed gradients. This is Monte Carlo arithmetic (Parker, 1997). Perturbed
gradients alone do not suffice. A gradient that is zero up to rounding, as of a bias before batch norm, differs in every
order of summation, and adaptive optimizers make whole steps of it. Perturbed parameters expose such gradients.

An element of a gradient that is exactly zero even with perturbed parameters keeps its zero. It belongs to a row of an
embedding that the batch does not use, or to a unit that is off: no order of summation changes it, but an adaptive
optimizer would make a whole step of a perturbation, and the noise floor would hide what it should show.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor


def perturb_gradients(gradients: Iterable[Tensor], generator: torch.Generator) -> None:
    """Change gradients in place in their last bits: elements but zeros by up to eps(dtype) x the tensor's largest."""
    for gradient in map(get_local, gradients):
        if gradient.layout == torch.sparse_coo:
            gradient = gradient._values()  # the same memory
        if gradient.is_floating_point() and gradient.numel() > 0:
            scale = gradient.abs().amax() * torch.finfo(gradient.dtype).eps
            gradient.add_(_draw_uniform(gradient, generator) * (scale * (gradient != 0)))


@contextlib.contextmanager
def perturbed_parameters(parameters: Iterable[Tensor], generator: torch.Generator) -> Iterator[None]:
    """Change parameters by up to one last bit each inside the context, and restore them at exit.

    Gradients computed inside remain, and so does everything that the script writes into a parameter inside, as in
    `p.data = p.data.clamp(-1, 1)`: only elements that still have their perturbed value get the original one back.

    Autograd does not learn of these changes: a script with two optimizers uses a graph after a step of the other one.
    """
    saved: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for parameter in map(get_local, parameters):
            if parameter.is_floating_point():
                original = parameter.clone()
                eps = torch.finfo(parameter.dtype).eps
                with _unsafe_preserve_version_counter(parameter):
                    parameter.mul_(1 + _draw_uniform(parameter, generator) * eps)
                saved.append((parameter, original, parameter.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, original, perturbed in reversed(saved):  # a parameter of two models is there twice
                if parameter.shape == perturbed.shape:
                    with _unsafe_preserve_version_counter(parameter):
                        parameter.copy_(torch.where(parameter == perturbed, original, parameter))


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that PyTorch distributes: all of it, because a perturbed run has one rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _draw_uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers in [-1, 1) in a tensor's shape and dtype, drawn on the CPU so that every device gets the same."""
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    return drawn.to(device=like.device, dtype=like.dtype)
