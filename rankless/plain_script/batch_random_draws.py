"""Random numbers that a script draws for the rows of a batch, as the noise of a GAN or the time steps of a diffusion.

Every rank draws all of them, which costs little and keeps the generators equal, and holds its rows. Otherwise a model
would run on the whole noise on every rank. A draw that has as many rows as the present batch by chance only moves more
data than it needs to.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.logical_view.tensor import IN_TRANSFORM, LogicalView
from rankless.plain_script.loaders import divide_tensor

DRAWS = ("rand", "randn", "randint", "normal")


@contextlib.contextmanager
def divide_draws(view: LogicalView) -> Iterator[None]:
    """Within the context, what the script draws for the rows of a batch is logical."""
    _device_constructors()  # PyTorch looks these functions up once, for `torch.set_default_device`
    with replace_attributes(*((torch, name, make_draw(vars(torch)[name], view)) for name in DRAWS)):
        yield


def make_draw(function: Callable[..., Any], view: LogicalView) -> Callable[..., Any]:
    """Return a function of `torch` that divides what it draws for the rows of the present batch."""

    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn = function(*args, **kwargs)
        rows = view.batch_rows
        is_of_batch = rows and not drawn.requires_grad and drawn.dim() and len(drawn) == rows and "out" not in kwargs
        if not is_of_batch or not is_of_script(sys._getframe(1).f_globals.get("__name__", "")):
            return drawn
        if IN_TRANSFORM() is not None or not view.agreement.is_script_thread():
            return drawn
        return divide_tensor(drawn, view, rows=rows)

    _builtins._register_builtin(draw, f"aten::{function.__name__}")
    return draw


def is_of_script(module: str) -> bool:
    """Return whether a module draws for its script. PyTorch's samplers and initial values are no rows of a batch."""
    return module.startswith("torch.distributions.") or module.partition(".")[0] not in ("torch", "rankless")
