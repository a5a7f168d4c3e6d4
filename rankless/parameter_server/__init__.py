"""Tables of rows by ids: embeddings that grow with the data.

`Embedding` (in `embedding`) looks up rows. `FTRL` (in `ftrl`) is an optimizer. `tables` holds and steps rows, without
PyTorch. Between the two, `table_training` connects a table with autograd and with the script's optimizers. `servers`
hold tables for the workers of a run, also without PyTorch: so what needs it is loaded on first use. It needs the extra
`ps`. `mark_dense` marks what heterogeneous workers compute.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rankless.parameter_server.tables.contents import TableStatistics
from rankless.parameter_server.tables.settings import ByCount, ByHash, Constant, Normal, Uniform

if TYPE_CHECKING:
    from rankless.parallel.dense_parts import mark_dense
    from rankless.parameter_server.embedding import Embedding
    from rankless.parameter_server.ftrl import FTRL

__all__ = ["FTRL", "ByCount", "ByHash", "Constant", "Embedding", "Normal", "TableStatistics", "Uniform", "mark_dense"]
LOADED_ON_USE = {
    "FTRL": "rankless.parameter_server.ftrl",
    "Embedding": "rankless.parameter_server.embedding",
    "mark_dense": "rankless.parallel.dense_parts",
}
"""The modules of functions and classes that need PyTorch."""


def __getattr__(name: str) -> Any:
    if name in LOADED_ON_USE:
        return getattr(importlib.import_module(LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'rankless.parameter_server' has no attribute {name!r}")
