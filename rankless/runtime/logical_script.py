"""Begins the logical view of a worker's script, once the script imports torch or has its first effect."""

import sys

from rankless.plain_script.effects import Effects
from rankless.plain_script.meeting import Meeting
from rankless.plain_script.view import install
from rankless.runtime.current_context import current_context
from rankless.runtime.process_context import RecordObserver


def begin_logical_view(effects: Effects) -> Meeting:
    """Join the other ranks, and let the script see one process whose batches are whole.

    Args:
        effects: What the ranks do once.
    """
    hook = sys.excepthook
    context = current_context(make_observer=_refuse_observer)
    sys.excepthook = hook  # joining has put the rank before each line of a traceback
    context.logical = install(context.world, effects)
    return Meeting(context.world, context.logical.agreement)


def _refuse_observer() -> RecordObserver:
    """Only a process without an agent asks for one."""
    raise AssertionError("the logical view begins in workers of a run")
