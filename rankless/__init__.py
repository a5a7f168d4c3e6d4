"""The same training on one device and on many: `rankless.job`, `rankless.loader`, and a launcher to match.

The names below come from `rankless.api`, on first use: the command line imports no torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rankless.errors import RanklessError
from rankless.version import VERSION as __version__

if TYPE_CHECKING:
    from rankless.api import (
        PerDevice,
        Whole,
        check_shards,
        check_synchronized,
        checkpoints,
        configure,
        init,
        job,
        load,
        loader,
        local,
        local_rank,
        once,
        rank,
        save,
        shutdown,
        spawn,
        world_size,
    )

if sys.platform == "win32":
    raise ImportError("Rankless runs on Linux (and, best effort, macOS), not on Windows: use WSL there.")

__all__ = [
    "PerDevice",
    "RanklessError",
    "Whole",
    "__version__",
    "check_shards",
    "check_synchronized",
    "checkpoints",
    "configure",
    "init",
    "job",
    "load",
    "loader",
    "local",
    "local_rank",
    "once",
    "rank",
    "save",
    "shutdown",
    "spawn",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("rankless.api"), name)
    raise AttributeError(f"module 'rankless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
