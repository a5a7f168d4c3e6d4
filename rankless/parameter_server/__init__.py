"""Tables of rows by ids: embeddings that grow with the data.

`Embedding` (in `embedding`) looks up rows. `FTRL` (in `ftrl`) is an optimizer. `tables` holds and steps rows, without
PyTorch. Between the two, `table_training` connects a table with autograd and with the script's optimizers. `servers`
hold tables for the workers of a run, also without PyTorch: so what needs it is loaded on first use. It needs the extra
`ps`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rankless.parameter_server.tables.contents import TableStatistics
from rankless.parameter_server.tables.settings import ByCount, ByHash, Constant, Normal, Uniform

if TYPE_CHECKING:
    from rankless.parameter_server.embedding import Embedding
    from rankless.parameter_server.ftrl import FTRL

__all__ = ["FTRL", "ByCount", "ByHash", "Constant", "Embedding", "Normal", "TableStatistics", "Uniform"]


def __getattr__(name: str) -> Any:
    module = {"Embedding": "embedding", "FTRL": "ftrl"}.get(name)
    if module is not None:
        return getattr(importlib.import_module(f"rankless.parameter_server.{module}"), name)
    raise AttributeError(f"module 'rankless.parameter_server' has no attribute {name!r}")
