"""The steps of a worker that trains on batches of its own, with dense parameters that servers hold and step."""

import contextlib
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.errors import TableError
from rankless.extensions.servers.optimizer_steps import require_known, settings_of
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable, TablePush, push_together
from rankless.extensions.servers.service.table_pulls import EarlyServedPull
from rankless.extensions.servers.tables.id_map import find_distinct, sum_rows
from rankless.extensions.servers.tables.row_store import RowStore
from rankless.extensions.servers.training.parameter_rows import Floats, ParameterRows, pull_rows
from rankless.extensions.servers.training.parameter_states import (
    dense_settings_of,
    list_state_versions,
    read_states,
    require_known_for_parameters,
    write_states,
)
from rankless.extensions.servers.training.replicated_table import Gather


class ServedParameter:
    """One parameter, whose rows are on the servers, and this worker's copy of it."""

    def __init__(self, rows: ParameterRows, parameter: Tensor, optimizer: Optimizer) -> None:
        """Use rows on all servers. They have no values yet."""
        self.parameter, self.optimizer = parameter, optimizer
        self.rows = rows
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
        self.rows.write(self.parameter, rows)
        self._note_read()

    def make_push(self, gradient: Tensor, group: dict[str, Any]) -> TablePush:
        """Return the push of one step. Raises TableError for a sparse gradient."""
        if gradient.layout != torch.strided:
            raise TableError(
                expected="dense gradients of parameters that servers hold, besides weights of embeddings in models",
                found=f"a sparse gradient of shape {list(gradient.shape)}",
                fix="make it by nn.Embedding or nn.EmbeddingBag with sparse=True, as part of the job's model",
            )
        return self.rows.make_push(self.rows.cut(gradient), dense_settings_of(self.optimizer, group))

    def pull_states(self) -> None:
        """Take the values and the optimizer's states of the servers."""
        values, states = self.rows.read_all()
        with torch.no_grad():
            write_states(self.optimizer, self.parameter, states)
        self.take(values)

    def restore(self) -> None:
        """Let the servers have this worker's values and its optimizer's states."""
        self.rows.restore(read_states(self.optimizer, self.parameter))

    def digest(self) -> bytes:
        """Return a digest of the values and the states."""
        found = read_states(self.optimizer, self.parameter)
        total = zlib.crc32(f"{found.optimizer} {found.steps}".encode())
        for each in (self.parameter, *found.states):
            total = zlib.crc32(self.rows.cut(each).tobytes(), total)
        return total.to_bytes(4, "little")

    def _note_read(self) -> None:
        with torch.no_grad():
            self._pulled.copy_(self.parameter)
        self._versions = self._list_versions()

    def _list_versions(self) -> Sequence[Any]:
        own = (self.parameter._version, self.parameter.data_ptr())
        return [own, *list_state_versions(self.optimizer, self.parameter)]


class ServedEmbedding(ServedParameter):
    """The weight of an embedding with sparse gradients, whose rows are rows on the servers."""

    def __init__(self, rows: ParameterRows, parameter: Tensor, optimizer: Optimizer) -> None:
        super().__init__(rows, parameter, optimizer)
        self._accepted: dict[str, Any] = {}
        """The settings with which PyTorch steps sparse gradients."""

    def make_push(self, gradient: Tensor, group: dict[str, Any]) -> TablePush:
        """Return the push of one step. Raises TableError for a dense gradient, and what PyTorch raises for settings."""
        if gradient.layout != torch.sparse_coo:
            raise TableError(
                expected="sparse gradients of the weight of an embedding with sparse=True",
                found=f"a dense gradient of shape {list(gradient.shape)}: the job uses the weight otherwise, too",
                fix="use sparse=False, or run the script without --servers",
            )
        settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
        if settings != self._accepted:
            _step_once(self.optimizer, group, self.parameter)
            self._accepted = settings
        ids = gradient._indices()[0].cpu().contiguous().numpy()
        distinct, places, _ = find_distinct(ids)
        sums = sum_rows(gradient._values().detach().cpu().contiguous().numpy(), places, len(distinct))
        ones = np.ones(len(distinct), np.int64)
        return TablePush(self.rows.store, distinct, ones, sums, settings_of(self.optimizer, group))


def _step_once(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Let an optimizer of the same settings step a sparse gradient. PyTorch refuses what it cannot do."""
    probe = nn.Parameter(torch.zeros(1, 2, dtype=parameter.dtype, device="cpu"))
    made: Any = type(optimizer)
    own = made([{**{key: value for key, value in group.items() if key != "params"}, "params": [probe]}], lr=group["lr"])
    places = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    values = torch.zeros(1, 2, dtype=parameter.dtype, device="cpu")
    probe.grad = torch.sparse_coo_tensor(places, values, probe.shape, check_invariants=False)
    with warnings.catch_warnings(action="ignore"):  # of sparse tensors that PyTorch makes itself
        own.step()


class ServedParameters:
    """The parameters of a worker's jobs that optimizers step."""

    def __init__(self, client: ServerClient, gather: Gather, *, is_first: bool) -> None:
        self._client, self._gather, self._is_first = client, gather, is_first
        self._served: dict[int, ServedParameter] = {}
        self._early: dict[int, EarlyServedPull] = {}
        """Values that servers have been asked for early, by parameter."""

    def share(
        self,
        optimizers: Iterable[Optimizer],
        table_weights: Iterable[Tensor],
        sparse_weights: Iterable[Tensor],
        *,
        is_current: bool,
        compares: bool,
    ) -> None:
        """Give the servers parameters that they do not have, or that the script has changed. Collective.

        Args:
            optimizers: Those of a job.
            table_weights: Parameters that stand for tables, whose rows are on the servers already.
            sparse_weights: Weights of embeddings with sparse gradients.
            is_current: Whether this worker has the values of the servers. If not, a change would undo others' steps.
            compares: Whether to look for changes in the elements.

        Raises:
            TableError: The workers' values differ, or are not current, or servers cannot make an optimizer's steps.
        """
        changed = [each for each in self._served.values() if each.is_changed(by_elements=compares)]
        if changed and not is_current:
            raise _change_error(f"a change of a parameter of shape {list(changed[0].parameter.shape)} between steps")
        left_out, sparse = {id(each) for each in table_weights}, {id(each) for each in sparse_weights}
        for optimizer in optimizers:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            known = left_out | self._served.keys()
            unknown = [each for each in parameters if each.numel() and id(each) not in known]
            changed += [self._open(each, optimizer, is_sparse=id(each) in sparse) for each in unknown]
        if not changed:
            return
        self.forget_early()
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
        served = [self._served[id(each)] for each in parameters if id(each) in self._served]
        early = [self._early.pop(id(each.parameter), None) for each in served]
        rows = [None if each is None else each.take() for each in early]
        for each, found in zip(served, rows, strict=True):
            if found is not None:
                each.take(found)
        _pull_together([each for each, found in zip(served, rows, strict=True) if found is None])

    def request_early(self) -> None:
        """Ask for the values of all parameters after this worker's last step, without waiting; see `pull`."""
        stores = {key: served.rows for key, served in self._served.items()}
        self._early = {key: rows.store.request_early(rows.ids) for key, rows in stores.items()}
        self._client.request_early_rows()

    def forget_early(self) -> None:
        """Use no values that servers have been asked for early: the next ones must be newer."""
        self._early.clear()
        self._client.forget_early_rows()

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
            push_together([served.make_push(gradient, group) for served, gradient, group in taken])

    def _open(self, parameter: Tensor, optimizer: Optimizer, *, is_sparse: bool) -> ServedParameter:
        name = f"parameter {len(self._served)}"
        served: ServedParameter
        if is_sparse:
            require_known(optimizer)
            rows = ParameterRows(self._client, name, parameter, row_elements=parameter.shape[1])
            served = ServedEmbedding(rows, parameter, optimizer)
        else:
            require_known_for_parameters(optimizer)
            served = ServedParameter(ParameterRows(self._client, name, parameter), parameter, optimizer)
        self._served[id(parameter)] = served
        return served


def _pull_together(parameters: Sequence[ServedParameter]) -> None:
    for each, rows in zip(parameters, pull_rows([each.rows for each in parameters]), strict=True):
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


class SharedParameters(Protocol):
    """The dense parameters that servers hold, where workers train on batches of their own."""

    def share(
        self,
        optimizers: Iterable[Optimizer],
        table_weights: Iterable[Tensor],
        sparse_weights: Iterable[Tensor],
        *,
        is_current: bool,
        compares: bool,
    ) -> None:
        """Give the servers parameters that they do not have, or that the script has changed. Collective.

        Args:
            optimizers: Those of a job.
            table_weights: Parameters that stand for tables.
            sparse_weights: Weights of embeddings with sparse gradients.
            is_current: Whether this worker has the values of the servers. If not, the script may change nothing.
            compares: Whether to look for changes in the elements, too.
        """
        ...

    def pull(self, parameters: Iterable[Tensor]) -> None:
        """Take the servers' values of parameters."""
        ...

    def pull_states(self) -> None:
        """Take the servers' values and optimizer states of all parameters."""
        ...

    def find_changed(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return the first parameter that has been changed since its values were read."""
        ...

    def step_on_servers(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Within the context, a step of the optimizer is made by the servers."""
        ...


class OwnSteps(Protocol):
    """The steps of a worker that trains on batches of its own. `geo_training` has another kind than this module."""

    @property
    def parameters(self) -> SharedParameters:
        """The dense parameters."""
        ...

    def begin_step(self) -> None:
        """Begin a training step of this worker."""
        ...

    def send(self) -> None:
        """Send to the servers what this worker has trained."""
        ...

    def read_all(self) -> None:
        """Take the servers' values of everything."""
        ...

    def add_table(self, served: ServedTable) -> RowStore:
        """Return the rows of a table on the servers, as this worker trains them."""
        ...

    def end_step(self) -> None:
        """End a step of this worker."""
        ...


class StepsOnServers:
    """The modes `async` and `bounded`: servers make each step when its gradients arrive."""

    def __init__(self, client: ServerClient, gather: Gather, *, is_first: bool) -> None:
        self.parameters = ServedParameters(client, gather, is_first=is_first)
        self._client = client

    def add_table(self, served: ServedTable) -> ServedTable:
        """Return the table: a worker has no rows of its own."""
        return served

    def begin_step(self) -> None:
        """Begin a training step of this worker."""
        self._client.begin_step()

    def end_step(self) -> None:
        """End it: what this worker has pushed is one transaction. Parameters for the next one come meanwhile."""
        self._client.commit()
        self.parameters.request_early()

    def send(self) -> None:
        """Wait until the servers have made all steps of this worker, which have been sent."""
        self.parameters.forget_early()  # all workers are about to read the same values
        self._client.wait_until_committed()

    def read_all(self) -> None:
        """Take the servers' values and optimizer states of all parameters."""
        self.parameters.pull_states()
