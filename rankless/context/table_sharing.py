"""The tables of rows among a script's modules, which workers share. `independent_workers.TableSharing` holds them."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

EMBEDDING_MODULE = "rankless.extensions.servers.embedding"
"""It is imported if the script uses tables."""


def find_tables(module: nn.Module) -> dict[str, Any]:
    """Return the tables (`rankless.parameter_server.Embedding`) of a module, itself included, by their names in it."""
    known = sys.modules.get(EMBEDDING_MODULE)
    if known is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, known.Embedding)}


def list_tables(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the tables of modules, each once, in their order."""
    return list(dict.fromkeys(table for module in modules for table in find_tables(module).values()))


def find_sparse_embeddings(module: nn.Module) -> dict[str, Any]:
    """Return the embeddings with sparse gradients of a module, itself included, by their names in it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse}


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


class WorkerSteps(Protocol):
    """The steps of a worker that trains on batches of its own."""

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


class SharedWeights(Protocol):
    """The weights of embeddings with sparse gradients whose rows are on servers."""

    def begin_call(self) -> None:
        """Let the servers have what the script has changed since the last call of a job. Collective, repeatable."""
        ...

    def end_call(self) -> None:
        """Note that the servers have what the script has changed: the call counts for all workers."""
        ...

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Within the context, a step of the optimizer is made by the servers for these weights."""
        ...


class SharedTables(Protocol):
    """Holds tables for all workers: in each of them, or on the servers of the run."""

    @property
    def sums_gradients(self) -> bool:
        """Whether a step has the gradients of all workers. Otherwise each worker makes steps of its own."""
        ...

    @property
    def own_steps(self) -> WorkerSteps:
        """The steps of this worker, where each makes steps of its own."""
        ...

    @property
    def weights(self) -> SharedWeights | None:
        """The weights of embeddings whose rows are on servers. None: each worker holds them."""
        ...

    def share(self, table: Any, before: Any) -> Any:
        """Return the store of rows of all workers for the table of this one. Collective.

        Args:
            table: The table.
            before: The store that had its rows before, or None.
        """
        ...

    def share_weights(self, weights: Mapping[str, tuple[nn.Parameter, Optimizer]]) -> None:
        """Give the servers the rows of weights, by name, with the optimizer that steps each. Collective."""
        ...

    def request_rows(self, lookups: Iterable[tuple[int, Tensor]]) -> bool:
        """Ask for the rows that the next call is expected to look up. Return whether that has been of use so far.

        Args:
            lookups: The number of a table and the ids of each lookup.
        """
        ...

    def prepare(self, weights: Iterable[Tensor]) -> None:
        """Give the servers the gradients of a program that has run, before its step.

        Args:
            weights: The parameters that stand for its tables.
        """
        ...

    @property
    def committed(self) -> int:
        """How many steps this worker has committed."""
        ...

    def regroup(self, workers: Any, committed: int) -> None:
        """Go on without lost workers.

        Args:
            workers: The workers with which the run began, `StartedWorkers`.
            committed: The last step that counts, of all workers that are left.
        """
        ...

    def commit(self) -> None:
        """End a step: from here on all workers read what it has changed."""
        ...

    def finish(self) -> None:
        """Wait until servers have noted the last step."""
        ...

    def close(self) -> None:
        """Leave the servers."""
        ...
