"""A table in training on one device: lookups that autograd knows, and steps together with the script's optimizers.

It finds the different ids of lookups, also of those that a worker expects; see Note [early rows].
"""

import functools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.errors import TableError
from rankless.extensions.servers.optimizer_steps import has_stepped, require_known, settings_of
from rankless.extensions.servers.tables.id_map import find_distinct, sum_rows
from rankless.extensions.servers.tables.row_gradients import RowGradients, no_gradients
from rankless.extensions.servers.tables.row_store import EarlyPull, EarlyRowStore, PreparedRowStore, RowStore
from rankless.extensions.servers.waiting_gradients import WaitingGradients

MOST_MISSES = 8
"""After so many predictions in a row without use there are no more."""
_MOST_SEARCHES = 16


class IdSearch(NamedTuple):
    """The different ids of one lookup.

    Args:
        ids: The ids, int64, of shape (n,).
        distinct: The different ones, of shape (m,).
        places: The number of each id among them, of shape (n,).
        occurrences: How often each occurs, of shape (m,).
    """

    ids: NDArray[np.int64]
    distinct: NDArray[np.int64]
    places: NDArray[np.int64]
    occurrences: NDArray[np.int64]


def search_ids(ids: NDArray[np.int64]) -> IdSearch:
    """Return the different ids of a lookup."""
    return IdSearch(ids, *find_distinct(ids))


class ExpectedLookup(NamedTuple):
    """A lookup whose rows have been asked for, from a store."""

    search: IdSearch
    store: RowStore
    pull: EarlyPull


class LookupSearches:
    """Searches for different ids, each of which is made once: early, for a lookup, or for its gradients."""

    def __init__(self) -> None:
        self._known: deque[IdSearch] = deque(maxlen=_MOST_SEARCHES)
        self._expected: list[ExpectedLookup] = []
        self._misses = 0

    def request(self, store: RowStore, lookups: Iterable[NDArray[np.int64]]) -> bool:
        """Ask a store for the rows of lookups that are expected, without waiting.

        Returns:
            Whether predictions have been of use. If not, nothing is asked for.
        """
        self._misses = self._misses + 1 if self._expected else 0
        self.forget_expected()
        if self._misses >= MOST_MISSES or not isinstance(store, EarlyRowStore):
            return False
        for ids in lookups:
            search = search_ids(ids)
            self._expected.append(ExpectedLookup(search, store, store.request_early(search.distinct)))
        return True

    def read(self, store: RowStore, ids: NDArray[np.int64]) -> tuple[IdSearch, NDArray[np.floating]]:
        """Return the search of a lookup, and the rows of its different ids."""
        expected = self._take_expected(ids)
        rows = None
        if expected is None:
            search = search_ids(ids)
        else:
            search = expected.search
            if expected.store is store:
                rows = expected.pull.take()
        self._known.append(search)
        return search, store.pull(search.distinct) if rows is None else rows

    def find(self, ids: NDArray[np.int64]) -> IdSearch:
        """Return the search of ids, which a lookup may have made."""
        known = next((search for search in self._known if np.array_equal(search.ids, ids)), None)
        return known or search_ids(ids)

    def forget(self) -> None:
        """Forget the searches of earlier lookups."""
        self._known.clear()

    def forget_expected(self) -> None:
        """Wait for no lookup any more."""
        for expected in self._expected:
            expected.pull.abandon()
        self._expected.clear()

    def _take_expected(self, ids: NDArray[np.int64]) -> ExpectedLookup | None:
        for place, expected in enumerate(self._expected):
            if np.array_equal(expected.search.ids, ids):
                return self._expected.pop(place)
        return None


_TRAININGS: "weakref.WeakSet[TableTraining]" = weakref.WeakSet()
"""The tables that optimizers may step. Their hooks are never removed: PyTorch may be going through them."""


@functools.cache
def _register_hooks() -> None:
    """Let every optimizer's step reach all tables, once per process."""
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():
        checks.disable()  # as they are: said explicitly, Adagrad's own sparse tensors give no warning
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    for training, _ in _list_stepped(optimizer):
        arguments, keywords = training.prepare_step(optimizer, arguments, keywords)
    return arguments, keywords


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for training, group in _list_stepped(optimizer):
        training.step(optimizer, group)


def _list_stepped(optimizer: Optimizer) -> list[tuple["TableTraining", dict[str, Any]]]:
    """Return the tables that an optimizer steps and their parameter groups, in an order that all workers have."""
    known = {id(training.weight): training for training in _TRAININGS}
    steps = ((known.get(id(parameter)), group) for group in optimizer.param_groups for parameter in group["params"])
    return [(training, group) for training, group in steps if training is not None]


def find_trainings(weights: Iterable[Tensor]) -> list["TableTraining"]:
    """Return the tables of weights that are in training, in the order of the weights."""
    known = {id(training.weight): training for training in _TRAININGS}
    found = (known.get(id(weight)) for weight in weights)
    return [training for training in found if training is not None]


class TableTraining:
    """The table of one weight, a parameter that stands for all rows; see Note [the gradient of a table]."""

    def __init__(self, table: RowStore, weight: nn.Parameter, padding_id: int | None) -> None:
        """Step the table whenever an optimizer steps the weight, as long as this object lives."""
        self.table = table
        self.weight = weight
        self.dtype = weight.dtype
        self._padding_id = padding_id
        self._waiting = WaitingGradients(weight)
        self._searches = LookupSearches()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._earlier_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._had_stepped = False
        _register_hooks()
        _TRAININGS.add(self)

    def close(self) -> None:
        """Step the table no longer: something else steps it."""
        self._waiting.close()
        self._searches.forget_expected()
        _TRAININGS.discard(self)

    def remove_hook(self) -> None:
        """Leave no hook on the weight, until its next gradient: a program is captured, and would not call it."""
        self._waiting.close()

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, of shape (*ids.shape, dim). Ids are int32 or int64, on any device."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return self.look_up_now(ids).to(self.weight.device)
        looked_up: Tensor = _Lookup.apply(self.weight, ids, self)  # type: ignore[no-untyped-call]  # untyped in PyTorch
        return looked_up

    def read(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of ids, int64, of shape (n,), on a CPU."""
        return self._clear_padding(ids, self.table.pull(ids))

    def _clear_padding(self, ids: NDArray[np.int64], rows: NDArray[np.floating]) -> Tensor:
        if self._padding_id is not None:
            rows[ids == self._padding_id] = 0
        return torch.from_numpy(rows)

    def look_up_now(self, ids: Tensor) -> Tensor:
        """Return the rows of ids without a graph, for a captured program."""
        search, rows = self._searches.read(self.table, to_array(ids))
        found = self._clear_padding(search.distinct, rows)
        return found[torch.from_numpy(search.places)].reshape(*ids.shape, self.table.settings.dim)

    def request_rows(self, ids: Iterable[Tensor]) -> bool:
        """Ask for rows that the next captured program will look up. Return whether that has been of use so far."""
        return self._searches.request(self.table, [to_array(each).copy() for each in ids])

    def add_of_program(self, ids: Tensor, gradients: Tensor) -> Tensor:
        """Add gradients of a captured program. Return the dense gradient of the weight."""
        return self._waiting.add_of_program(self.sum_gradients(self._searches.find(to_array(ids)), gradients))

    def begin_program(self) -> None:
        """Forget gradients: the weight has none, and a captured program makes new ones."""
        self._searches.forget()
        self._waiting.begin_program()

    def end_program(self) -> None:
        """Note the weight's gradient, which the program has set."""
        self._waiting.end_program()

    def join_gradients(self, before: RowGradients | None, factors: tuple[float, float]) -> RowGradients | None:
        """Join the gradients of a job's last call with those of earlier ones; see `WaitingGradients.join`."""
        return self._waiting.join(before, factors)

    def restore_gradients(self, joint: RowGradients | None) -> None:
        """Let the next step have what `join_gradients` has returned, without calls since then."""
        self._waiting.replace(joint)

    def replace_gradients(self, added: RowGradients) -> None:
        """Let these be all gradients of the next step, and give the weight a sparse gradient that stands for them."""
        self._waiting.begin_program()
        entry = self._waiting.add_of_program(added)
        places = torch.zeros(1, 1, dtype=torch.int64, device=entry.device)
        self.weight.grad = torch.sparse_coo_tensor(places, entry, entry.shape, check_invariants=False)
        self._waiting.end_program()

    def prepare_program(self) -> RowGradients:
        """Return this worker's gradients of the program that has run. The step then pushes nothing but a factor."""
        return self._waiting.prepare() or no_gradients(self.table.settings)

    def add_gradients(self, added: RowGradients) -> Tensor:
        """Add gradients within a backward pass. Return the gradient of the weight."""
        return self._waiting.add(added)

    def sum_gradients(self, search: IdSearch, gradients: Tensor) -> RowGradients:
        """Return the sums of a lookup's gradients by its different ids, without those of padding.

        Args:
            search: The ids of the lookup, n in all.
            gradients: The gradients of the rows, whose last dim is the table's, n rows in all.
        """
        rows = gradients.detach().reshape(-1, gradients.shape[-1]).cpu().contiguous().numpy()
        added = RowGradients(search.distinct, search.occurrences, sum_rows(rows, search.places, len(search.distinct)))
        if self._padding_id is None:
            return added
        kept = added.ids != self._padding_id
        return RowGradients(added.ids[kept], added.occurrences[kept], added.gradients[kept])

    def prepare_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refuse an optimizer before it steps other parameters, and remember what its step will change.

        The waiting gradients see what the script has done to them, before the optimizer changes them itself.

        Returns:
            The arguments of the step, perhaps with another closure.
        """
        self._had_stepped = has_stepped(optimizer, self.weight)
        if self.weight.grad is not None:
            require_known(optimizer)
            self._use_optimizer(optimizer)
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            self._waiting.prepare_step()
            return arguments, keywords

        def followed() -> Any:
            loss = closure()
            self._waiting.prepare_step()
            return loss

        if len(arguments) > 1:
            return (arguments[0], followed, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": followed}

    def _use_optimizer(self, optimizer: Optimizer) -> None:
        """Let the table begin with new states if another optimizer steps the weight than before."""
        current = None if self._optimizer is None else self._optimizer()
        if optimizer is current:
            return
        if optimizer in self._earlier_optimizers:
            raise TableError(
                expected="one optimizer at a time for a table's weight, because its states are with the rows",
                found="an optimizer that has stepped it before another one did",
                fix="step the weight with one optimizer",
            )
        if current is not None:
            self._earlier_optimizers.add(current)
        if not self._had_stepped:
            self.table.reset_states()
        self._optimizer = weakref.ref(optimizer)

    def step(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Step the table as an optimizer has stepped its weight, with the settings of the weight's group."""
        if self.weight.grad is None:
            return
        self._use_optimizer(optimizer)  # a closure may have made the first gradient within the step
        self.weight.detach().zero_()  # what the optimizer did to it means nothing
        settings = settings_of(optimizer, group)
        # A gradient that was zeroed in place is one without rows: the step counts, and rows with momentum move.
        factor = self._waiting.take_prepared_factor()
        gradients = self._waiting.take() or no_gradients(self.table.settings)
        if factor is not None:
            cast("PreparedRowStore", self.table).push_prepared(settings, factor)
            return
        self.table.push(gradients.ids, gradients.occurrences, gradients.gradients, settings)


class _Lookup(torch.autograd.Function):
    """Rows of ids, whose gradients go to the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, training: TableTraining) -> Tensor:
        ctx.training = training
        # Equal ids read one row, so that their gradients are summed without looking the row up again.
        ctx.search = search = search_ids(to_array(ids))
        rows = training.read(search.distinct)[torch.from_numpy(search.places)]
        return rows.reshape(*ids.shape, rows.shape[1]).to(weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        added = ctx.training.sum_gradients(ctx.search, gradient)
        weight_gradient = ctx.training.add_gradients(added)
        return weight_gradient, None, None


def to_array(ids: Tensor) -> NDArray[np.int64]:
    """Return ids of any shape, type and device as one array, of shape (n,)."""
    array: NDArray[np.int64] = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    return array
