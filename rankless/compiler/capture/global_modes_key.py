"""PyTorch's global modes that affect what a job computes; they are part of a program's key."""

from collections.abc import Hashable

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankless.compiler.capture.autocast import get_autocast_state
from rankless.errors import CaptureError


def get_torch_modes(device_type: str) -> Hashable:
    """Return the modes that are set now."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        get_autocast_state(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        *(id(mode) for mode in _get_current_function_mode_stack()),
        *(id(mode) for mode in _get_current_dispatch_mode_stack()),
    )


def require_grad_enabled(job: str, line: str) -> None:
    """Raise `CaptureError` for a train job called with gradients disabled: the plain script's backward would fail."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise CaptureError(
            expected=f"train job {job!r} to be called with gradients enabled",
            found="a call inside torch.no_grad() or torch.inference_mode()",
            fix="call it outside, or remove optimizer= if the job only predicts",
            where=line or None,
        )
