"""PyTorch's global modes that affect what a job computes; they are part of a program's key. One is `torch.autocast`.

Note [ambient autocast]: a script may write `with torch.autocast(…): loss = train(images, labels)`. The context is a
thread setting that no tensor shows, so it is part of a program's key. It applies to the job's function only: backward
and optimizer step run outside, as PyTorch requires of plain scripts. The program contains the casts and runs without
autocast. The cache of cast weights lives as long as the context, so it would outlive an optimizer step that changes
them.
"""

import contextlib
from collections.abc import Hashable, Iterator

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankless.errors import CaptureError


def get_autocast_state(device_type: str) -> tuple[tuple[str, torch.dtype] | None, ...]:
    """Return autocast's dtype for this type of device and for the CPU; None where autocast is off."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device_type))
    )


@contextlib.contextmanager
def clear_autocast_cache() -> Iterator[None]:
    """Within the context, no weight cast from an earlier call is used; afterwards none from this call remains."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def disable_autocast(device_type: str) -> Iterator[None]:
    """Within the context, operators run in the dtypes of their inputs."""
    with contextlib.ExitStack() as stack:
        if any(get_autocast_state(device_type)):
            for kind in dict.fromkeys(("cpu", device_type)):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def apply_autocast_state(state: tuple[tuple[str, torch.dtype] | None, ...]) -> Iterator[None]:
    """Within the context, autocast has the state that `get_autocast_state` returned."""
    with contextlib.ExitStack() as stack:
        for entry in filter(None, state):
            kind, dtype = entry
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


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
