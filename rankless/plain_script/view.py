"""Installs the logical view in a worker, before the first line of the script that uses torch."""

import atexit
from contextlib import ExitStack

from rankless.context.world import World
from rankless.logical.gradients import LogicalBackward
from rankless.logical.tensor import LogicalView
from rankless.plain_script.effects import Effects
from rankless.plain_script.loaders import divide_batches
from rankless.plain_script.optimizer_settings import OptimizerSettings
from rankless.plain_script.script_steps import ScriptSteps
from rankless.plain_script.single_process import hide_ranks


def install(world: World, effects: Effects | None = None) -> LogicalView:
    """Let the script see one process with whole batches, until this process ends.

    Args:
        world: The ranks. Their mesh has the axis `data` alone.
        effects: What the script's ranks do once, if there is anything.

    Returns:
        The view.
    """
    view = LogicalView(world.mesh, world.notify)
    OptimizerSettings(view.agreement).watch()
    stack = ExitStack()
    stack.enter_context(LogicalBackward(view).install())
    ScriptSteps(world.events).watch()
    stack.enter_context(divide_batches(view, world, effects))
    stack.enter_context(hide_ranks())
    atexit.register(stack.pop_all().close)
    return view
