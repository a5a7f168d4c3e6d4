"""Noticing that each of several workers starts a whole training of its own, by `torch.multiprocessing.spawn`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from rankless.user_code import script_line


def watch_spawning(multiprocessing: Any, notify: Callable[[str], None], *, world_size: int) -> None:
    """Say once that a worker, one of `world_size`, calls `spawn` of `torch.multiprocessing`; what that does stays."""
    spawn = multiprocessing.spawn

    @functools.wraps(spawn)
    def watched(*arguments: Any, **keywords: Any) -> Any:
        multiprocessing.spawn = spawn
        line = script_line(sys._getframe(1))
        notify(
            f"{line}: the script starts processes itself, and each of the {world_size} workers does so; "
            "start such a script with `python` or with `rankless run -n 1`"
        )
        return spawn(*arguments, **keywords)

    multiprocessing.spawn = watched
