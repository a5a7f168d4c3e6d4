"""Tables of rows by ids: embeddings that grow with the data.

`Embedding` (in `embedding`) looks up rows. `tables` holds and steps them, without PyTorch. Between the two,
`table_training` connects a table with autograd and with the script's optimizers. It needs the extra `ps`.
"""

from rankless.parameter_server.embedding import Embedding
from rankless.parameter_server.tables.contents import TableStatistics
from rankless.parameter_server.tables.settings import ByCount, ByHash, Constant, Normal, Uniform

__all__ = ["ByCount", "ByHash", "Constant", "Embedding", "Normal", "TableStatistics", "Uniform"]
