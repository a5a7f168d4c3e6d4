"""Weights of embeddings with sparse gradients, whose rows servers hold and step, where all workers make each step.

Note [steps of served weights]: `.grad` of a weight is the whole batch's, on every worker. In the optimizer's step a
parameter of one row takes the weight's place, so PyTorch makes the step and refuses what it cannot do. The table of
that parameter (`table_training`) then pushes the gradients of rows. Each worker pushes another part of them
(`divided_pushes`).
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.compiler.ir.looked_up_parameter import LookedUpParameter, WatchedValue, digest, make_looked_up
from rankless.errors import TableError
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.table_training import TableTraining
from rankless.extensions.servers.tables.id_map import find_distinct, sum_rows
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.training.divided_pushes import DividedStore, PushDivision
from rankless.extensions.servers.training.parameter_rows import ParameterRows
from rankless.extensions.servers.training.parameter_states import ParameterStates, list_state_keys, read_states
from rankless.extensions.servers.training.replicated_table import Gather
from rankless.ownership.unread_tensor import UnreadTensor


class ServedRows:
    """The value of a weight on the servers, as a source of its elements."""

    def __init__(self, name: str, parameter: Tensor, rows: ParameterRows) -> None:
        self.name = name
        self.shape = tuple(parameter.shape)
        self.dtype, self.device = parameter.dtype, parameter.device
        self._rows = rows
        self._process_id = os.getpid()

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int64, of shape (n,), on a CPU."""
        self._require_own_process()
        distinct, places, _ = find_distinct(ids.contiguous().numpy())
        return torch.from_numpy(self._rows.store.pull(distinct))[torch.from_numpy(places)]

    def read(self) -> Tensor:
        """Return all rows."""
        self._require_own_process()
        return torch.from_numpy(self._rows.store.pull(self._rows.ids)).to(self.device)

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim."""
        if dim != 0:
            return self.read().narrow(dim, start, length).clone()
        self._require_own_process()
        return torch.from_numpy(self._rows.store.pull(self._rows.ids[start : start + length])).to(self.device)

    def _require_own_process(self) -> None:
        """Raise TableError in a child process, which must not use the worker's connections."""
        if os.getpid() != self._process_id:
            raise TableError(
                expected=f"{self.name}, whose rows are on servers, to be read by the workers",
                found="a child process, as of a DataLoader",
                fix="pass it a copy that the worker has made: copy.deepcopy(model)",
            )


class ServedState(ServedRows):
    """One state of a weight's optimizer on the servers, as a source of its elements."""

    def __init__(self, name: str, parameter: Tensor, rows: ParameterRows, number: int) -> None:
        super().__init__(name, parameter, rows)
        self._number = number

    def read(self) -> Tensor:
        """Return the state."""
        self._require_own_process()
        return self._rows.read_all()[1].states[self._number].to(self.device)

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim."""
        return self.read().narrow(dim, start, length).clone()


class ServedWeight:
    """One weight, whose rows and optimizer states are on the servers."""

    def __init__(
        self, rows: ParameterRows, division: PushDivision, name: str, parameter: nn.Parameter, optimizer: Optimizer
    ) -> None:
        """Use rows on all servers. They have no values yet."""
        self.name, self.parameter = name, parameter
        self.optimizer = optimizer
        """The optimizer that steps it."""
        self._rows = rows
        self._source = ServedRows(name, parameter, rows)
        self.stand_in = nn.Parameter(torch.zeros(1, 2, dtype=parameter.dtype, device="cpu"))
        self.training = TableTraining(DividedStore(rows.store, division), self.stand_in, None)
        self._stand_in_state: dict[str, Any] | None = None
        """PyTorch's states of the stand-in. None: begin with those that the script has for the weight."""
        self._shown: dict[str, tuple[Any, int]] = {}
        """The states that the script has had for the weight since the last step, and their versions."""

    def free_memory(self) -> None:
        """Let the worker have no rows: the servers have them."""
        make_looked_up(self.parameter, self._source)
        self._note_states()

    def is_changed(self) -> bool:
        """Return whether the script has changed the value or the optimizer's states since the last step."""
        state = self.optimizer.state.get(self.parameter, {})
        if self._value.is_changed() or state.keys() != self._shown.keys():
            return True
        return any(_is_changed(state[key], *shown) for key, shown in self._shown.items())

    def digest(self) -> bytes:
        """Return a checksum of what the script sees."""
        found = self._read_states()
        numbers = [digest(self.parameter.detach()), *(digest(each) for each in found.states)]
        return f"{self.name} {found.optimizer} {found.steps} {numbers}".encode()

    def restore(self) -> None:
        """Let the servers have what the script sees. One worker does it for all."""
        self._rows.restore(self._read_states())

    def take_restored(self) -> None:
        """Go on with what the servers have been given."""
        self._stand_in_state = None
        for value in self._list_watched():
            value.accept()
        self._note_states()

    def refresh(self) -> None:
        """Forget values that are not the newest any more, and update those that the script holds."""
        for value in self._list_watched():
            value.forget()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Give the stand-in the gradient, and the states that PyTorch's step needs."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self._value.is_changed():
            raise TableError(
                expected=f"a job that does not change {self.name}, whose rows are on servers",
                found="a change of its elements within the call",
                fix="change them between calls, or run the script without --servers",
            )
        if gradient.layout != torch.sparse_coo:
            raise TableError(
                expected=f"a sparse gradient of {self.name}, whose rows are on servers",
                found=f"a dense gradient of shape {list(gradient.shape)}: the job uses the weight otherwise, too",
                fix="use sparse=False, or run the script without --servers",
            )
        ids = gradient._indices()[0].cpu().contiguous().numpy()
        distinct, places, _ = find_distinct(ids)
        sums = sum_rows(gradient._values().detach().cpu().contiguous().numpy(), places, len(distinct))
        self.training.replace_gradients(RowGradients(distinct, np.ones(len(distinct), np.int64), sums))
        if self._stand_in_state is None or optimizer is not self.optimizer:
            self._stand_in_state = _make_states(optimizer.state.get(self.parameter, {}), self.stand_in)
        self.optimizer = optimizer
        optimizer.state[self.stand_in] = self._stand_in_state

    def end_step(self, optimizer: Optimizer) -> None:
        """Let the script have states for the weight that are read from the servers when something needs them."""
        made = self._stand_in_state = optimizer.state.pop(self.stand_in, {})
        state = optimizer.state[self.parameter]
        before = dict(state)
        state.clear()
        for key in made:
            if key == "step" or made[key] is None:
                state[key] = made[key]
            elif _find_watched(before.get(key)) is not None:
                state[key] = before[key]
            else:
                number = list_state_keys(made).index(key)
                source = ServedState(f"{key} of {self.name}", self.parameter, self._rows, number)
                state[key] = UnreadTensor(WatchedValue(source))
        self._note_states()

    def _list_watched(self) -> list[WatchedValue]:
        states = [_find_watched(each) for each, _ in self._shown.values()]
        return [self._value, *(value for value in states if value is not None)]

    @property
    def _value(self) -> WatchedValue:
        assert isinstance(self.parameter, LookedUpParameter)
        return self.parameter.partition

    def _note_states(self) -> None:
        state = self.optimizer.state.get(self.parameter, {})
        self._shown = {key: (value, _version_of(value)) for key, value in state.items()}

    def _read_states(self) -> ParameterStates:
        return read_states(self.optimizer, self.parameter)


class ServedWeights:
    """The weights of a worker's jobs whose rows are on the servers."""

    def __init__(
        self, client: ServerClient, gather: Gather, division: PushDivision, *, is_first: Callable[[], bool]
    ) -> None:
        """Hold weights on the servers.

        Args:
            client: The connections to the servers.
            gather: Exchanges bytes with the other workers.
            division: Says which worker pushes which rows.
            is_first: Whether this worker is the first one of those that are left.
        """
        self._client, self._gather, self._division, self._is_first = client, gather, division, is_first
        self._served: dict[int, ServedWeight] = {}
        self._with_plain_states: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._offered: list[ServedWeight] = []
        """Those whose changes the servers have got in the call that has begun."""

    def share(
        self,
        weights: Mapping[str, tuple[nn.Parameter, Optimizer]],
        run_for_all: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """Give the servers the rows of weights, which are equal on all workers, unless they have them. Collective.

        Args:
            weights: Each weight and the optimizer that steps it, by its name.
            run_for_all: Makes an operation of all workers.

        Raises:
            TableError: The servers cannot hold a weight.
        """
        new: dict[int, tuple[str, nn.Parameter, Optimizer]] = {}
        for name, (parameter, optimizer) in weights.items():
            if id(parameter) not in self._served:
                new.setdefault(id(parameter), (name, parameter, optimizer))
        if not new:
            return
        made: list[ServedWeight] = run_for_all(lambda: self._make(list(new.values())))
        for each in made:
            self._served[id(each.parameter)] = each
            each.free_memory()

    def _make(self, weights: list[tuple[str, nn.Parameter, Optimizer]]) -> list[ServedWeight]:
        """Give the servers the rows of new weights. The worker still has them."""
        made = []
        for number, (name, parameter, optimizer) in enumerate(weights, len(self._served)):
            rows = ParameterRows(self._client, f"weight {number}", parameter, row_elements=parameter.shape[1])
            made.append(ServedWeight(rows, self._division, name, parameter, optimizer))
        if self._is_first():
            for each in made:
                each.restore()
        self._gather(b"")  # nobody reads before the rows are there
        return made

    def begin_call(self) -> None:
        """Let the servers have what the script has changed since the last call of a job. Collective.

        It can be repeated until `end_call`.

        Raises:
            TableError: The workers have changed different things.
        """
        if not self._served:
            return
        changed = self._list_changed()
        everyone = self._gather(msgspec.msgpack.encode([each.digest() for each in changed]))
        other = next((rank for rank, each in enumerate(everyone) if each != everyone[0]), None)
        if other is not None:
            names = [each.name for each in changed] or ["a weight, elsewhere"]
            raise TableError(
                expected="weights on servers, and their optimizers' states, that all workers change alike",
                found=f"other changes on worker {other} than on worker 0; on this worker: {', '.join(names)}",
                fix="let all workers make the same changes: do not ask for the rank before",
            )
        if self._is_first():
            for each in changed:
                each.restore()
        if changed:
            self._gather(b"")  # nobody reads before the rows are there
        self._offered = changed

    def end_call(self) -> None:
        """Note that the servers have what the script has changed: the call counts for all workers."""
        offered, self._offered = self._offered, []
        for each in offered:
            each.take_restored()
        self.refresh()

    def _list_changed(self) -> list[ServedWeight]:
        return [each for each in self._served.values() if each.is_changed()]

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, servers make the optimizer's step for weights; see Note [steps of served weights]."""
        taken: list[tuple[list[Any], int, ServedWeight]] = []

        def take(_: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            for group in optimizer.param_groups:
                parameters = group["params"]
                for place, parameter in enumerate(parameters):
                    served = self._served.get(id(parameter))
                    if served is not None and parameter.grad is not None:
                        served.begin_step(optimizer)
                        parameters[place] = served.stand_in
                        taken.append((parameters, place, served))
                        arguments, keywords = served.training.prepare_step(optimizer, arguments, keywords)
            return arguments, keywords

        handle = optimizer.register_step_pre_hook(take)  # after those of the script, which may change gradients
        try:
            yield
        finally:
            handle.remove()
            for parameters, place, served in taken:
                parameters[place] = served.parameter
        for _, _, served in taken:
            served.end_step(optimizer)
        if taken and optimizer not in self._with_plain_states:
            self._with_plain_states.add(optimizer)
            optimizer.register_state_dict_post_hook(_read_states_of)

    def refresh(self) -> None:
        """Forget values that are not the newest any more, and update those that the script holds."""
        for each in self._served.values():
            each.refresh()


def _read_states_of(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return what `state_dict()` returns, with plain tensors in place of states that are on servers."""
    states = {number: dict(state) if isinstance(state, dict) else state for number, state in found["state"].items()}
    for state in states.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            watched = _find_watched(value)
            if watched is not None:
                state[key] = watched.gather()
    return {**found, "state": states}


def _is_changed(found: Any, shown: Any, version: int) -> bool:
    """Return whether the script has replaced or changed a state."""
    if found is not shown or _version_of(found) != version:
        return True
    watched = _find_watched(shown)
    return watched is not None and watched.is_changed()


def _find_watched(value: Any) -> WatchedValue | None:
    """Return the value of a state on servers; None for another one."""
    return value.partition if isinstance(value, UnreadTensor) and isinstance(value.partition, WatchedValue) else None


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not isinstance(value, UnreadTensor) else 0


def _make_states(states: Mapping[str, Any], stand_in: Tensor) -> dict[str, Any]:
    """Return states of a stand-in like those that an optimizer has for a weight. Only the number of steps counts."""
    made: dict[str, Any] = {}
    for key, value in states.items():
        if key == "step" or not isinstance(value, Tensor):
            made[key] = value.clone() if isinstance(value, Tensor) else value
        elif key == "momentum_buffer":  # PyTorch adds sparse gradients to it
            made[key] = torch.zeros_like(stand_in, requires_grad=False).to_sparse(1)
        else:
            made[key] = torch.zeros_like(stand_in, requires_grad=False)
    return made
