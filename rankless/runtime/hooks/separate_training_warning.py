"""Warns if each of several workers trains a model of its own, because nothing in the script connects them.

A script without a job, a process group or an extension's API runs once per worker, and each copy trains alone. The hook
looks at the second step of an optimizer and then removes itself, so later steps cost nothing.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankless.config.extensions import list_aliases
from rankless.user_code import script_line

CONNECTING_MODULES = ("mpi4py", "ray")
"""Modules by which a script may connect its processes without torch.distributed, beside those of extensions."""


def warn_on_separate_training(notify: Callable[[str], None], *, world_size: int) -> None:
    """Observe the optimizers of this process, one of `world_size` workers, and call `notify` at most once."""
    steps = 0

    def on_step(*_arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != 2:  # the hook stays: PyTorch is going through all hooks, of which none may be removed now
            return
        frame = sys._getframe(1)
        if is_alone_with_accelerate(frame):
            reason = "Accelerate uses one process here; to train on CPUs together pass Accelerator(cpu=True)"
        elif not is_connected():
            reason = (
                "the script has no job and no process group; make the training step a @rankless.job, or use "
                "DistributedDataParallel"
            )
        else:
            return
        notify(
            f"{script_line(frame)}: each of the {world_size} workers trains a model of its own: {reason}. For one "
            "training start it with -n 1"
        )

    register_optimizer_step_post_hook(on_step)


def is_connected() -> bool:
    """Return whether this process has joined others, or has loaded a library that does."""
    names = {*CONNECTING_MODULES, *(each for name, alias in list_aliases().items() for each in (name, alias.target))}
    joined = sys.modules.get("rankless.runtime.current_context")
    if joined is not None and joined.join_line() is not None:
        return True
    return (dist.is_available() and dist.is_initialized()) or any(name in sys.modules for name in names)


def is_alone_with_accelerate(frame: FrameType | None) -> bool:
    """Return whether Accelerate makes this step, and takes the process for the only one.

    Accelerate makes a process group even then. Without a GPU it connects processes only if the script asks for CPUs.
    """
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.PartialState._shared_state
    if shared.get("num_processes", 1 if shared else None) != 1:
        return False
    while frame is not None and frame.f_globals.get("__name__") != "accelerate.optimizer":
        frame = frame.f_back
    return frame is not None
