"""PyTorch's switches that decide what a job computes: they are part of what tells programs apart."""

from collections.abc import Hashable

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankless.compiler.capture.autocast import get_autocast_state
from rankless.errors import CaptureError


def get_torch_modes(device_type: str) -> Hashable:
    """The switches as they are now."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        get_autocast_state(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        *(id(mode) for mode in _get_current_function_mode_stack()),
        *(id(mode) for mode in _get_current_dispatch_mode_stack()),
    )


def require_grad_enabled(job: str, line: str) -> None:
    """Refuse a train job where gradients are switched off: plainly, its backward would fail."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise CaptureError(
            expected=f"train job {job!r} to be called where gradients are recorded",
            found="a call inside torch.no_grad() or torch.inference_mode()",
            fix="call it outside, or take optimizer= away if the job only predicts",
            where=line or None,
        )
