"""Warns if each of several workers starts a whole training of its own with `torch.multiprocessing.spawn`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from rankless.user_code import script_line


def warn_on_nested_spawn(multiprocessing: Any, notify: Callable[[str], None], *, world_size: int) -> None:
    """Patch `spawn` of `torch.multiprocessing`: the first call in one of `world_size` workers warns, then spawns."""
    spawn = multiprocessing.spawn

    @functools.wraps(spawn)
    def observed_spawn(*arguments: Any, **keywords: Any) -> Any:
        multiprocessing.spawn = spawn
        line = script_line(sys._getframe(1))
        notify(
            f"{line}: the script starts processes itself, and each of the {world_size} workers does so; "
            "start such a script with `python` or with `rankless run -n 1`"
        )
        return spawn(*arguments, **keywords)

    multiprocessing.spawn = observed_spawn
