"""The `init_process_group` that a hook of the default group has replaced."""

from collections.abc import Callable

import torch.distributed as dist

ORIGINAL = "rankless_original"
"""The attribute of the hook's function with the function that it replaces."""


def find_original_init() -> Callable[..., None]:
    """Return `dist.init_process_group`, or what the hook of the default group calls in its place.

    A group that cannot have shared memory is made of Gloo. The hook would try to share memory again.
    """
    init: Callable[..., None] = dist.init_process_group
    return getattr(init, ORIGINAL, init)
