"""Installs the logical view in a worker, before the first line of the script that uses torch."""

import atexit
from contextlib import ExitStack

from rankless.context.world import World
from rankless.logical.gradients import LogicalBackward
from rankless.logical.tensor import LogicalView
from rankless.plain_script.loaders import divide_batches
from rankless.plain_script.single_process import hide_ranks


def install(world: World) -> LogicalView:
    """Let the script see one process with whole batches, until this process ends.

    Args:
        world: The ranks. Their mesh has the axis `data` alone.

    Returns:
        The view.
    """
    view = LogicalView(world.mesh, world.notify)
    stack = ExitStack()
    stack.enter_context(LogicalBackward(view).install())
    stack.enter_context(divide_batches(view, world))
    stack.enter_context(hide_ranks())
    atexit.register(stack.pop_all().close)
    return view
