"""Dense parameters on servers, for workers that train on batches of their own.

Note [parameters as rows]: a parameter's elements are cut into rows of one length, and the rows are those of a table,
with the numbers from 0 up as ids. So servers divide, step, log and restore them as any other rows. A step has gradients
for all of them.
"""

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from rankless.errors import TableError
from rankless.parameter_server.parameter_states import (
    ParameterStates,
    dense_settings_of,
    list_state_versions,
    read_states,
    require_known_for_parameters,
    write_states,
)
from rankless.parameter_server.replicated_table import Gather
from rankless.parameter_server.servers.client import ServerClient
from rankless.parameter_server.servers.served_table import TablePush, pull_together, push_together
from rankless.parameter_server.tables.contents import TableContents
from rankless.parameter_server.tables.settings import Constant, TableSettings

ROW_ELEMENTS = 256
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
Floats = NDArray[np.floating]


class ServedParameter:
    """One parameter, whose rows are on the servers, and this worker's copy of it."""

    def __init__(self, client: ServerClient, name: str, parameter: Tensor, optimizer: Optimizer) -> None:
        """Open the rows on all servers. They have no values yet."""
        self.parameter, self.optimizer = parameter, optimizer
        self._dim = max(1, min(ROW_ELEMENTS, parameter.numel()))
        self.ids = np.arange(-(-parameter.numel() // self._dim), dtype=np.int64)
        self._ones = np.ones(len(self.ids), np.int64)
        settings = TableSettings(dim=self._dim, dtype=_dtype_of(parameter), initial=Constant(value=0.0))
        self.store = client.open_table(name, settings)
        self._versions: Sequence[Any] = ()
        self._pulled = torch.empty_like(parameter, requires_grad=False)

    def is_changed(self, *, by_elements: bool = False) -> bool:
        """Return whether the script has changed the parameter, or its optimizer's states, since they were last read.

        Args:
            by_elements: Whether to look at the parameter's elements. Without it a change by `.data` is not found.
        """
        if list(self._versions) != self._list_versions():
            return True
        return by_elements and not _have_equal_bits(self.parameter, self._pulled)

    def take(self, rows: Floats) -> None:
        """Take the values of the servers."""
        self._write(self.parameter, rows)
        self._note_read()

    def make_push(self, gradient: Tensor, group: dict[str, Any]) -> TablePush:
        """Return the push of one step."""
        settings = dense_settings_of(self.optimizer, group)
        return TablePush(self.store, self.ids, self._ones, self._cut(gradient), settings)

    def pull_states(self) -> None:
        """Take the values and the optimizer's states of the servers."""
        contents = self.store.contents()
        parts = contents.rows.reshape(len(self.ids), -1, self._dim)
        self._write(self.parameter, parts[:, 0])
        states = [torch.empty_like(self.parameter, requires_grad=False) for _ in range(parts.shape[1] - 1)]
        for number, state in enumerate(states, 1):
            self._write(state, parts[:, number])
        found = ParameterStates(contents.optimizer, contents.optimizer_steps, tuple(states))
        with torch.no_grad():
            write_states(self.optimizer, self.parameter, found)
        self._note_read()

    def restore(self) -> None:
        """Let the servers have this worker's values and its optimizer's states."""
        found = read_states(self.optimizer, self.parameter)
        rows = [self._cut(each) for each in (self.parameter, *found.states)]
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

    def digest(self) -> bytes:
        """Return a digest of the values and the states."""
        found = read_states(self.optimizer, self.parameter)
        total = zlib.crc32(f"{found.optimizer} {found.steps}".encode())
        for each in (self.parameter, *found.states):
            total = zlib.crc32(self._cut(each).tobytes(), total)
        return total.to_bytes(4, "little")

    def _note_read(self) -> None:
        with torch.no_grad():
            self._pulled.copy_(self.parameter)
        self._versions = self._list_versions()

    def _list_versions(self) -> Sequence[Any]:
        own = (self.parameter._version, self.parameter.data_ptr())
        return [own, *list_state_versions(self.optimizer, self.parameter)]

    def _cut(self, tensor: Tensor) -> Floats:
        """Return a tensor's elements as rows. The last one is filled with zeros."""
        flat = tensor.detach().to("cpu", self.parameter.dtype).reshape(-1).numpy()
        rows = np.zeros(len(self.ids) * self._dim, flat.dtype)
        rows[: len(flat)] = flat
        return rows.reshape(len(self.ids), self._dim)

    def _write(self, tensor: Tensor, rows: Floats) -> None:
        flat = np.ascontiguousarray(rows).reshape(-1)[: tensor.numel()]
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(flat).reshape(tensor.shape))


class ServedParameters:
    """The parameters of a worker's jobs that optimizers step."""

    def __init__(self, client: ServerClient, gather: Gather, *, is_first: bool) -> None:
        self._client, self._gather, self._is_first = client, gather, is_first
        self._served: dict[int, ServedParameter] = {}

    def share(
        self, optimizers: Iterable[Optimizer], table_weights: Iterable[Tensor], *, is_current: bool, compares: bool
    ) -> None:
        """Give the servers parameters that they do not have, or that the script has changed. Collective.

        Args:
            optimizers: Those of a job.
            table_weights: Parameters that stand for tables, whose rows are on the servers already.
            is_current: Whether this worker has the values of the servers. If not, a change would undo others' steps.
            compares: Whether to look for changes in the elements.

        Raises:
            TableError: The workers' values differ, or are not current, or servers cannot make an optimizer's steps.
        """
        changed = [each for each in self._served.values() if each.is_changed(by_elements=compares)]
        if changed and not is_current:
            raise _change_error(f"a change of a parameter of shape {list(changed[0].parameter.shape)} between steps")
        left_out = {id(each) for each in table_weights}
        for optimizer in optimizers:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            unknown = [each for each in parameters if id(each) not in left_out | self._served.keys()]
            changed += [self._open(parameter, optimizer) for parameter in unknown]
        if not changed:
            return
        digests = b"".join(each.digest() for each in changed)
        everyone = self._gather(digests)  # all have made their earlier steps, too
        other = next((worker for worker, each in enumerate(everyone) if each != everyone[0]), None)
        if other is not None:
            raise _change_error(f"other values on worker {other} than on worker 0")
        if self._is_first:
            for each in changed:
                each.restore()
        self._gather(b"")  # nobody reads before the values are there
        _pull_together(changed)

    def pull(self, parameters: Iterable[Tensor]) -> None:
        """Take the servers' values of parameters."""
        _pull_together([self._served[id(each)] for each in parameters if id(each) in self._served])

    def pull_states(self) -> None:
        """Take the servers' values and optimizer states of all parameters."""
        for served in self._served.values():
            served.pull_states()

    def find_changed(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return the first parameter that has been changed since its values were read."""
        known = ((parameter, self._served.get(id(parameter))) for parameter in parameters)
        return next((parameter for parameter, served in known if served is not None and served.is_changed()), None)

    @contextlib.contextmanager
    def step_on_servers(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, a step of the optimizer is made by the servers for the parameters that they have."""
        taken: list[tuple[ServedParameter, Tensor, dict[str, Any]]] = []

        def take(*_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    served = self._served.get(id(parameter))
                    if served is not None and parameter.grad is not None:
                        taken.append((served, parameter.grad, group))
                        parameter.grad = None

        handle = optimizer.register_step_pre_hook(take)  # after those of the script, which may change gradients
        try:
            yield
        finally:
            handle.remove()
            for served, gradient, _ in taken:
                served.parameter.grad = gradient
        if taken:
            push_together([served.make_push(_require_dense(gradient), group) for served, gradient, group in taken])

    def _open(self, parameter: Tensor, optimizer: Optimizer) -> ServedParameter:
        require_known_for_parameters(optimizer)
        served = ServedParameter(self._client, f"parameter {len(self._served)}", parameter, optimizer)
        self._served[id(parameter)] = served
        return served


def _pull_together(parameters: Sequence[ServedParameter]) -> None:
    if parameters:
        pulled = pull_together([each.store for each in parameters], [each.ids for each in parameters])
        for each, rows in zip(parameters, pulled, strict=True):
            each.take(rows)


def _have_equal_bits(one: Tensor, other: Tensor) -> bool:
    bits = torch.int64 if one.dtype == torch.float64 else torch.int32
    return torch.equal(one.detach().contiguous().view(bits), other.contiguous().view(bits))


def _change_error(found: str) -> TableError:
    return TableError(
        expected="parameters and optimizer states that the script changes only where all workers have the same ones",
        found=found,
        fix="change them before the first step, after a pass over a loader, or by rankless.load; or use --server-mode "
        "sync. In the other modes a worker does not have the others' latest steps in between",
    )


def _dtype_of(parameter: Tensor) -> Any:
    if parameter.dtype not in _DTYPES:
        raise TableError(
            expected="parameters of float32 or float64, which servers can hold",
            found=f"{parameter.dtype} of shape {list(parameter.shape)}",
            fix="use float32 parameters and autocast, or --server-mode sync",
        )
    return _DTYPES[parameter.dtype]


def _require_dense(gradient: Tensor) -> Tensor:
    if gradient.layout != torch.strided:
        raise TableError(
            expected="dense gradients of parameters that servers hold",
            found=f"a sparse gradient of shape {list(gradient.shape)}",
            fix="use rankless.parameter_server.Embedding, whose rows servers hold by id",
        )
    return gradient
