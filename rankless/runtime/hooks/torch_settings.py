"""What a worker sets in torch when its script first imports it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups
from torch.optim.optimizer import register_optimizer_step_post_hook


def apply(
    *,
    seed: int | None,
    threads: int | None,
    dtype: str | None,
    before_leaving: Callable[[BaseException | None], None],
    step_made: Callable[..., None] | None = None,
) -> None:
    """Set threads, seed, dtype and debug level, and have `before_leaving` called before groups are destroyed, and
    `step_made` after each step of an optimizer.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype is not None:
        # Jobs cast their own models and arguments. What a script does besides, as an average of parameters
        # made before the first call or a model called on noise outside jobs, must be of one dtype with them.
        torch.set_default_dtype(getattr(torch, dtype))
    if seed is not None:
        torch.manual_seed(seed)
    else:
        torch.seed()  # as in a process of its own: what torch drew at its import, all forks of the parent share
    if step_made is not None:
        register_optimizer_step_post_hook(step_made)
    if dist.is_available():
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, missing in the stubs
        _announce_destruction(before_leaving)


def _announce_destruction(before_leaving: Callable[[BaseException | None], None]) -> None:
    # A script that fails, destroys its group, then cleans up for a while, is known as the culprit only if
    # it says so first: its peers lose their connection at once, and its own exception reaches the top much
    # later.
    destroy = groups.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        before_leaving(sys.exc_info()[1])
        destroy(group)

    destroy_process_group.__doc__ = destroy.__doc__
    _replace(groups, destroy_process_group)
    _replace(dist, destroy_process_group)


def _replace(module: Any, function: Callable[..., None]) -> None:
    module.destroy_process_group = function
