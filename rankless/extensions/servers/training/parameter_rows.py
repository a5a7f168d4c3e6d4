"""Note [parameters as rows]: a parameter's elements are cut into rows of one length, and the rows are those of a table,
with the numbers from 0 up as ids. So servers divide, step, log and restore them as any other rows. A step has gradients
for all of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankless.errors import TableError
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import TablePush
from rankless.extensions.servers.service.table_pulls import pull_together
from rankless.extensions.servers.tables.contents import TableContents
from rankless.extensions.servers.tables.optimizers import OptimizerSettings
from rankless.extensions.servers.tables.settings import Constant, TableSettings
from rankless.extensions.servers.training.parameter_states import ParameterStates

ROW_ELEMENTS = 256
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
Floats = NDArray[np.floating]


class ParameterRows:
    """The rows of one parameter on the servers.

    Args:
        client: The connections to the servers.
        name: The name of the rows on the servers.
        parameter: The parameter.
        row_elements: Elements of a row. The last row is filled up with zeros.

    Raises:
        TableError: Servers cannot hold the parameter's type.
    """

    def __init__(self, client: ServerClient, name: str, parameter: Tensor, *, row_elements: int = ROW_ELEMENTS) -> None:
        self._parameter = parameter
        self._dim = min(row_elements, parameter.numel())
        self.ids = np.arange(-(-parameter.numel() // self._dim), dtype=np.int64)
        self._ones = np.ones(len(self.ids), np.int64)
        settings = TableSettings(dim=self._dim, dtype=_dtype_of(parameter), initial=Constant(value=0.0))
        self.store = client.open_table(name, settings)

    def cut(self, tensor: Tensor) -> Floats:
        """Return the elements of a tensor of the parameter's shape as rows. The last row is filled with zeros."""
        flat = tensor.detach().to("cpu", self._parameter.dtype).reshape(-1).numpy()
        rows = np.zeros(len(self.ids) * self._dim, flat.dtype)
        rows[: len(flat)] = flat
        return rows.reshape(len(self.ids), self._dim)

    def write(self, tensor: Tensor, rows: Floats) -> None:
        """Overwrite a tensor of the parameter's shape with the elements of rows."""
        flat = np.ascontiguousarray(rows).reshape(-1)[: tensor.numel()]
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(flat).reshape(tensor.shape))

    def make_push(self, gradients: Floats, settings: OptimizerSettings) -> TablePush:
        """Return the push of one step."""
        return TablePush(self.store, self.ids, self._ones, gradients, settings)

    def read_all(self) -> tuple[Floats, ParameterStates]:
        """Return the values on the servers, as rows, and the states of their optimizer."""
        contents = self.store.contents()
        parts = contents.rows.reshape(len(self.ids), -1, self._dim)
        states = [torch.empty_like(self._parameter, requires_grad=False) for _ in range(parts.shape[1] - 1)]
        for number, state in enumerate(states, 1):
            self.write(state, parts[:, number])
        return parts[:, 0], ParameterStates(contents.optimizer, contents.optimizer_steps, tuple(states))

    def restore(self, found: ParameterStates) -> None:
        """Let the servers have the parameter's values and states of its optimizer."""
        rows = [self.cut(each) for each in (self._parameter, *found.states)]
        nothing = np.empty(0, np.int64)
        self.store.restore(
            TableContents(
                step=found.steps,
                optimizer=found.optimizer,
                optimizer_steps=found.steps,
                initial_state=0.0,
                ids=self.ids,
                rows=np.concatenate(rows, axis=1),
                used_steps=np.full(len(self.ids), found.steps),
                waiting_ids=nothing,
                waiting_occurrences=nothing,
                waiting_steps=nothing,
            )
        )


def pull_rows(parameters: Sequence[ParameterRows]) -> list[Floats]:
    """Return the values of parameters on the servers, as rows."""
    if not parameters:
        return []
    return pull_together([each.store for each in parameters], [each.ids for each in parameters])


def _dtype_of(parameter: Tensor) -> Any:
    if parameter.dtype not in _DTYPES:
        raise TableError(
            expected="parameters of float32 or float64, which servers can hold",
            found=f"{parameter.dtype} of shape {list(parameter.shape)}",
            fix="use float32 parameters and autocast, or omit --servers",
        )
    return _DTYPES[parameter.dtype]
