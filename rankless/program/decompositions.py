"""Which operators are written out in simpler ones during capture, and why those.

Losses and statistics that divide by a number of elements are decomposed, so that the *logical* count is in the program
and survives the split. Everything else stays as it is: fewer nodes, and the kernels of the plain script.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward,
        aten.huber_loss,
        aten.huber_loss_backward,
        aten.soft_margin_loss,
        aten.soft_margin_loss_backward,
        aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward,
        aten.binary_cross_entropy_with_logits,
        aten.var,
        aten.var_mean,
        aten.std,
        aten.std_mean,
        aten.linalg_vector_norm,
        aten.norm,
        aten.logsumexp,
        aten.addcmul,
        aten.addcdiv,
        aten.lerp,
        aten.stack,
        aten.unbind,
        aten.split_with_sizes,
        aten.split,
    ]
)
