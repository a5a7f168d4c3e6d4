"""Breakpoints in workers: what waits while somebody debugs a rank, and an error where nobody can."""

import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from rankless.config.environment import snapshot
from rankless.errors import ConfigError
from rankless.user_code import script_line

DEBUG_TIMEOUT = timedelta(days=7)
"""How long collectives wait in a run with `--debug-rank`."""


def refuse_breakpoints(rank: int) -> None:
    """Let `breakpoint()` raise in this process, which has no terminal. PYTHONBREAKPOINT still chooses another function.

    Without this, pdb reads the end of its input and raises `BdbQuit`, which names neither line nor remedy.
    """
    original = sys.breakpointhook

    def refuse(*arguments: Any, **options: Any) -> Any:
        if snapshot().get("PYTHONBREAKPOINT"):
            return original(*arguments, **options)
        raise _make_error(rank, sys._getframe(1))

    sys.breakpointhook = refuse


def refuse_pdb(rank: int) -> None:
    """Let `pdb.set_trace()` raise in this process, for the same reason. Call this once pdb is imported."""

    def set_trace(*_arguments: Any, **_options: Any) -> None:
        raise _make_error(rank, sys._getframe(1))

    sys.modules["pdb"].set_trace = set_trace  # type: ignore[attr-defined]


def refuse_distributed_breakpoints(dist: Any, rank: int) -> None:
    """Let `torch.distributed.breakpoint` raise on this rank if it is the one to debug."""
    original = dist.breakpoint

    def distributed_breakpoint(chosen: int = 0, *arguments: Any, **options: Any) -> None:
        if options.get("rank", chosen) == rank:
            raise _make_error(rank, sys._getframe(1))
        original(chosen, *arguments, **options)

    dist.breakpoint = distributed_breakpoint


def extend_timeouts(groups: Any, dist: Any) -> None:
    """Let the collectives of all groups that this process makes from now on wait for a rank that is debugged.

    Args:
        groups: `torch.distributed.distributed_c10d`.
        dist: `torch.distributed`.
    """
    groups.default_pg_timeout = DEBUG_TIMEOUT
    groups._new_process_group_helper = _with_timeout(groups._new_process_group_helper)
    init = _with_timeout(groups.init_process_group)
    for module in (groups, dist):
        module.init_process_group = init


def _with_timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options | {"timeout": DEBUG_TIMEOUT})

    call.__dict__.update(function.__dict__)
    call.__wrapped__ = function  # type: ignore[attr-defined]  # as functools.wraps does
    return call


def _make_error(rank: int, frame: FrameType | None) -> ConfigError:
    line = script_line(frame)
    place = f" at {line}" if line else ""
    return ConfigError(
        expected="a rank with a terminal, for the debugger to read from",
        found=f"a breakpoint{place} on rank {rank}, which has none",
        fix=f"rankless run --debug-rank {rank} … gives rank {rank} the terminal; with -n 1 the only rank has its input",
    )
