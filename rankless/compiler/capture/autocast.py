"""`torch.autocast` around the call of a job: part of what the job is, as if it stood inside.

Note [ambient autocast]: a script may write `with torch.autocast(…): loss = train(images, labels)`. The context is a
setting of the thread that no tensor shows. So it is part of a program's key, it covers the job's function only (its
backward and its optimizer's step run outside, as PyTorch asks of plain scripts), and a program, which has the casts in
it, runs without. The cache of cast weights lives as long as the context, and would outlive a step that changes them.
"""

import contextlib
from collections.abc import Iterator

import torch


def get_autocast_state(device_type: str) -> tuple[tuple[str, torch.dtype] | None, ...]:
    """What autocast does now to operators on this type of device, and on the CPU."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device_type))
    )


@contextlib.contextmanager
def clear_autocast_cache() -> Iterator[None]:
    """Within, no weight's cast from an earlier call is used; after, none from this call is left."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def disable_autocast(device_type: str) -> Iterator[None]:
    """Within, operators run in the dtypes of what they are given."""
    if not any(get_autocast_state(device_type)):
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(("cpu", device_type)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def apply_autocast_state(state: tuple[tuple[str, torch.dtype] | None, ...]) -> Iterator[None]:
    """Within, autocast does what it did when `autocast_state` was asked."""
    with contextlib.ExitStack() as stack:
        for entry in filter(None, state):
            kind, dtype = entry
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
