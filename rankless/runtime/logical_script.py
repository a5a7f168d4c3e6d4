"""Begins the logical view of a worker's script, once the script imports torch."""

from rankless.plain_script.view import install
from rankless.runtime.current_context import current_context
from rankless.runtime.process_context import RecordObserver


def begin_logical_view() -> None:
    """Join the other ranks, and let the script see one process whose batches are whole."""
    install(current_context(make_observer=_refuse_observer).world)


def _refuse_observer() -> RecordObserver:
    """Only a process without an agent asks for one."""
    raise AssertionError("the logical view begins in workers of a run")
