"""The model with tables of several benchmarks, and its samples."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rankless.parameter_server import Embedding


class TableModel(nn.Module):
    """Looks each field of a sample up in a table of its own, and computes one number from the rows."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([Embedding(16) for _ in range(fields)])
        self.dense = nn.Sequential(nn.Linear(16 * fields, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return one number for each row of ids, which has one id for each field."""
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        return self.dense(torch.cat(rows, dim=1)).squeeze(1)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return an optimizer for the tables and one for the rest."""
        return [torch.optim.Adagrad(self.tables.parameters(), 0.05), torch.optim.Adam(self.dense.parameters(), 1e-3)]


def random_samples(count: int, fields: int, ids: int = 100_000) -> TensorDataset:
    """Return ids, of which few are frequent, and wanted numbers."""
    return TensorDataset((torch.rand(count, fields) ** 3 * ids).long(), torch.randn(count))
