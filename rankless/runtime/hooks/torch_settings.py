"""Applies a worker's settings to torch when its script first imports torch."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankless.config.run_config import Precision
from rankless.runtime.hooks.destroyed_groups import DestroyedGroups
from rankless.runtime.hooks.float64_mode import enter_float64_mode


def apply(
    *,
    seed: int | None,
    threads: int | None,
    dtype: Precision | None,
    before_teardown: Callable[[BaseException | None], None],
    on_step: Callable[..., None] | None = None,
) -> None:
    """Set threads, seed, dtype and debug level, and register two callbacks.

    Args:
        seed: The seed of torch's generators, or None to draw one.
        threads: How many threads torch's operators use, or None to leave that to torch.
        dtype: "float64" to compute in float64 throughout, or None to leave the dtype to the script.
        before_teardown: Called before the script destroys process groups, with the exception in flight.
        on_step: Called after each step of an optimizer.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype is not None:
        # Jobs cast their own models and arguments. Other tensors of the script need the same dtype: an average of
        # parameters made before the first call, or the noise on which a script calls a model outside jobs.
        enter_float64_mode()
    if seed is not None:
        torch.manual_seed(seed)
    else:
        torch.seed()  # all forks of the fork server share the seed that torch drew when it was imported
    if on_step is not None:
        register_optimizer_step_post_hook(on_step)
    if dist.is_available():
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, missing in the stubs
        _patch_destroy_process_group(before_teardown)


def _patch_destroy_process_group(before_teardown: Callable[[BaseException | None], None]) -> None:
    # A script may fail, destroy its group and clean up for a while. Its peers lose their connection at once, and its
    # own exception arrives much later. The agent finds the root cause only if this rank reports before it destroys.
    destroy = groups.destroy_process_group
    destroyed = DestroyedGroups()

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        before_teardown(sys.exc_info()[1])
        living = destroyed.living_groups()
        destroy(group)
        group = None  # a reference from here would count as use
        destroyed.keep(living)

    destroy_process_group.__doc__ = destroy.__doc__
    destroy_process_group.__wrapped__ = destroy  # type: ignore[attr-defined]  # as functools.wraps does
    _replace(groups, destroy_process_group)
    _replace(dist, destroy_process_group)


def find_original_destroy() -> Callable[..., None]:
    """Return PyTorch's own function that destroys process groups, without the report to the agent."""
    current: Callable[..., None] = dist.destroy_process_group
    return getattr(current, "__wrapped__", current)


def _replace(module: Any, function: Callable[..., None]) -> None:
    module.destroy_process_group = function
