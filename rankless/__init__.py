"""The same training on one device and on many: `rankless.job`, `rankless.loader`, and a launcher.

The names in `__all__` are loaded from `rankless.api` on first use, so that the command line does not import torch.
`rankless.errors` has every error that Rankless raises. `rankless.collectives` has the functions of `torch.distributed`
with checks.
"""

import importlib
import random
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankless.errors import RanklessError
from rankless.version import VERSION as __version__

if TYPE_CHECKING:
    from rankless.api import (
        Job,
        Loader,
        PerDevice,
        Plan,
        Whole,
        check_shards,
        check_synchronized,
        checkpoints,
        configure,
        deferred,
        init,
        job,
        load,
        loader,
        local,
        local_rank,
        logical,
        once,
        place,
        rank,
        save,
        shard_batch,
        shutdown,
        spawn,
        stopping,
        world_size,
    )

if sys.platform == "win32":
    raise ImportError("Rankless runs on Linux (and, best effort, macOS), not on Windows: use WSL there.")

__all__ = [
    "Job",
    "Loader",
    "PerDevice",
    "Plan",
    "RanklessError",
    "Whole",
    "__version__",
    "check_shards",
    "check_synchronized",
    "checkpoints",
    "configure",
    "deferred",
    "init",
    "job",
    "load",
    "loader",
    "local",
    "local_rank",
    "logical",
    "once",
    "place",
    "rank",
    "save",
    "shard_batch",
    "shutdown",
    "spawn",
    "stopping",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(_import_api(), name)
    if name == "parameter_server":
        return importlib.import_module("rankless.parameter_server")
    raise AttributeError(f"module 'rankless' has no attribute {name!r}")


def _import_api() -> ModuleType:
    """Return `rankless.api`. A library that draws random numbers while it is imported must not move the script's."""
    if "rankless.api" in sys.modules:
        return sys.modules["rankless.api"]
    state = random.getstate()
    try:
        return importlib.import_module("rankless.api")
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted(__all__)
