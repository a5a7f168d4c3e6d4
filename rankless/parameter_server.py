"""Tables of rows by ids: embeddings that grow with the data.

`Embedding` looks up rows. `FTRL` is an optimizer. `mark_dense` marks what heterogeneous workers compute. The extra `ps`
installs what tables and servers need. `rankless.extensions.servers` has the code; what needs PyTorch is loaded on first
use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rankless.extensions.servers.tables.contents import TableStatistics
from rankless.extensions.servers.tables.settings import ByCount, ByHash, Constant, Normal, Uniform

if TYPE_CHECKING:
    from rankless.extensions.servers.dense_parts import mark_dense
    from rankless.extensions.servers.embedding import Embedding
    from rankless.extensions.servers.ftrl import FTRL

__all__ = ["FTRL", "ByCount", "ByHash", "Constant", "Embedding", "Normal", "TableStatistics", "Uniform", "mark_dense"]
LOADED_ON_USE = {
    "FTRL": "rankless.extensions.servers.ftrl",
    "Embedding": "rankless.extensions.servers.embedding",
    "mark_dense": "rankless.extensions.servers.dense_parts",
}
"""The modules of functions and classes that need PyTorch."""


def __getattr__(name: str) -> Any:
    if name in LOADED_ON_USE:
        return getattr(importlib.import_module(LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'rankless.parameter_server' has no attribute {name!r}")
