"""An embedding of 64-bit ids without a largest one: `nn.Embedding` whose rows are made when training needs them.

For its lookups in captured programs see Note [lookups in a program] in `table_operators`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from rankless.checkpoint.content import are_rows_left_out
from rankless.errors import TableError
from rankless.extensions.servers.table_operators import register_source, table_rows
from rankless.extensions.servers.table_training import TableTraining
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.row_store import RowStore
from rankless.extensions.servers.tables.settings import Admission, Initial, Normal, TableSettings
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.training import PARTICIPANT
from rankless.ownership.modules_with_states_elsewhere import ExtensionModule


class CapturedLookups:
    """Reads rows for programs, and takes their gradients. A program has the number of this object, while it lives."""

    def __init__(self, find_training: Callable[[], TableTraining]) -> None:
        """Register the table of one module.

        Args:
            find_training: A method of the module. It returns the table in training, whose weight and rows the script
                may have replaced. The module stays free to go.
        """
        self._find_training = weakref.WeakMethod(find_training)
        self._number = register_source(self)

    def look_up(self, weight: Tensor, ids: Tensor, dim: int) -> Tensor:
        """Return the rows of ids, with `dim` elements, as an operator of the program that is being captured."""
        rows: Tensor = table_rows(weight, ids, self._number, dim)
        return rows

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, on a CPU."""
        return self._training().look_up_now(ids)

    def request_rows(self, ids: Sequence[Tensor]) -> bool:
        """Ask for rows that the next program will read. Return whether that has been of use so far."""
        return self._training().request_rows(ids)

    def add_gradients(self, ids: Tensor, gradients: Tensor) -> Tensor:
        """Take the gradients of rows for the next step. Return the dense gradient of the weight."""
        return self._training().add_of_program(ids, gradients)

    def _training(self) -> TableTraining:
        find_training = self._find_training()
        assert find_training is not None, "a program has outlived the table of its lookups"
        return find_training()


if TYPE_CHECKING:
    from rankless.extensions.servers.training.worker_tables import WorkerTables

INDEX_TYPES = (torch.int32, torch.int64)


class Embedding(ExtensionModule):
    """Looks up rows of 64-bit ids. An id gets its row in the first training step that has it.

    It trains as `nn.Embedding(sparse=True)` does, with `torch.optim.SGD`, `Adagrad` or `SparseAdam` on its parameters:
    equal ids give equal results, to rounding. An id without a row reads as its initial values.

    Args:
        embedding_dim: Elements of a row.
        padding_idx: An id that reads as zeros and has no gradient.
        initial: Distribution of the values of new rows: `Normal`, `Uniform` or `Constant`.
        seed: Initial values depend on the id and on this number alone. None: a number drawn from PyTorch's generator.
        admission: Which ids get a row: None for all, `ByCount` or `ByHash`. Gradients of others are left out.
        expire_after_steps: Rows that no step has used for more than this number of steps are removed, at the latest
            after as many steps again. None: never.
        max_rows: Most rows. Beyond it, those unused for longest are removed. None: as many as the host's memory holds.
        device: Device of the results. Rows are in the host's memory.
        dtype: torch.float32 or torch.float64. None: PyTorch's default.

    Raises:
        TableError: An argument is out of range, or memory cannot be reserved.

    A call takes ids, int32 or int64, of any shape, and returns rows of the shape `(*ids.shape, embedding_dim)`.

    Example:
        >>> embedding = rankless.parameter_server.Embedding(16)
        >>> optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
        >>> embedding(torch.tensor([3, -(2**62), 3])).sum().backward()
        >>> optimizer.step()
        >>> embedding.statistics().rows
        2
    """

    rankless_participant = PARTICIPANT

    def __init__(
        self,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        initial: Initial | None = None,
        seed: int | None = None,
        admission: Admission | None = None,
        expire_after_steps: int | None = None,
        max_rows: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        dtype = dtype or torch.get_default_dtype()
        settings = TableSettings(
            dim=embedding_dim,
            dtype=_table_dtype(dtype),
            seed=int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed,
            initial=Normal() if initial is None else initial,
            admission=admission,
            expire_after_steps=expire_after_steps,
            max_rows=max_rows,
        )
        self.weight = nn.Parameter(torch.zeros(1, 2, device=device, dtype=dtype))
        self._table: RowStore = Table(settings)
        self._shared: RowStore | None = None
        """The last store of all workers. After `load_state_dict`, the next job puts the loaded rows there."""
        self._sums_gradients = True
        """Whether a step has the gradients of all workers."""
        self._training: TableTraining | None = None
        self._lookups: CapturedLookups | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in PyTorch
    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids. Raises TableError if they are no integers, or nobody would sum gradients."""
        is_captured = isinstance(ids, FakeTensor) or detect_fake_mode() is not None
        if ids.dtype not in INDEX_TYPES:
            raise TableError(expected="ids of int32 or int64", found=ids.dtype, fix="pass ids.to(torch.int64)")
        if is_captured:
            return self._require_lookups().look_up(self.weight, ids, self.embedding_dim)
        self._require_summed_gradients()
        return self._current_training().look_up(ids)

    def share(self, tables: "WorkerTables") -> None:
        """Hold the rows together with other workers, unless that has been done. Collective. Jobs call it."""
        if isinstance(self._table, Table):
            self._close_training()
            self._convert_table()
            self._table = self._shared = tables.share(self._table, self._shared)
            self._sums_gradients = tables.sums_gradients
            self.let_programs_read()

    def let_programs_read(self) -> None:
        """Let programs look rows up that are captured now. Jobs call it.

        Example:
            >>> Embedding(4).let_programs_read()
        """
        if self._training is not None:
            self._training.remove_hook()
        if self._lookups is None:  # programs know its number, also after `load_state_dict`
            self._lookups = CapturedLookups(self._current_training)

    def begin_program(self) -> None:
        """Forget the gradients of earlier calls: a job runs a captured program. Jobs call it."""
        self._current_training().begin_program()

    def end_program(self) -> None:
        """Note the gradient that a program has given the weight. Jobs call it."""
        self._current_training().end_program()

    def join_gradients(self, before: RowGradients | None, factors: tuple[float, float]) -> RowGradients | None:
        """Join the gradients of a job's last call with those of earlier ones, for one step of all. Jobs call it.

        Args:
            before: What the method has returned for earlier calls.
            factors: By what to multiply these, and those of the last call.

        Example:
            >>> embedding = Embedding(4)
            >>> embedding.join_gradients(None, (1.0, 1.0)) is None
            True
        """
        return self._current_training().join_gradients(before, factors)

    def restore_gradients(self, joint: RowGradients | None) -> None:
        """Let the next step have what `join_gradients` has returned, without calls since then. Jobs call it.

        Args:
            joint: The gradients of all calls that the step has.

        Example:
            >>> Embedding(4).restore_gradients(None)
        """
        self._current_training().restore_gradients(joint)

    def statistics(self) -> TableStatistics:
        """Return numbers of rows and of what has happened to them."""
        return self._table.statistics()

    def list_rows(self) -> dict[str, Tensor]:
        """Return the ids that have rows, int64, of shape (n,), and their rows, of shape (n, dim), sorted."""
        contents = self._table.contents()
        rows = contents.rows[:, : self.embedding_dim]
        return {"ids": torch.from_numpy(contents.ids), "rows": torch.from_numpy(np.ascontiguousarray(rows))}

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{self.embedding_dim}, rows={self.statistics().rows}, dtype={self._table.settings.dtype}"

    def get_extra_state(self) -> dict[str, Any]:
        """Return the table as tensors and numbers, for `state_dict`."""
        # Rows that another worker saves stay where they are; see Note [rows of a save] in `content`.
        store = Table(self._table.settings) if are_rows_left_out() else self._table
        contents = vars(store.contents())
        values = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in contents.items()
        }
        return {**values, "seed": self._table.settings.seed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take a table from `state_dict`. Raises TableError if it does not fit."""
        values: dict[str, Any] = {
            name: value.numpy() if isinstance(value, Tensor) else value for name, value in state.items()
        }
        settings = dataclasses.replace(self._table.settings, seed=values.pop("seed"))
        table = Table(settings)
        table.restore(TableContents(**values))
        self._close_training()
        self._table = table

    def _current_training(self) -> TableTraining:
        training = self._training
        if training is None or training.weight is not self.weight or training.dtype != self.weight.dtype:
            self._close_training()
            self._convert_table()
            training = self._training = TableTraining(self._table, self.weight, self.padding_idx)
        return training

    def _require_lookups(self) -> CapturedLookups:
        """Return the lookups of captured programs. Raises TableError if no job shares the table."""
        if self._lookups is None:
            raise TableError(
                expected="the module of each table that a job looks up among the models of the job",
                found="a captured call with a table that is no part of them",
                fix="pass the module in model=, alone or in a list or dict",
            )
        return self._lookups

    def _require_summed_gradients(self) -> None:
        """Raise TableError for a lookup on several workers whose gradients nobody would sum."""
        workers = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self._sums_gradients and workers > 1 and torch.is_grad_enabled() and self.weight.requires_grad:
            raise TableError(
                expected=f"a lookup with gradients inside a captured job, because {workers} workers share the table",
                found="a lookup outside of one",
                fix="call the model in a function with @rankless.job(model=…), without capture=False and mirrored=, or "
                "read it under torch.no_grad()",
            )

    def _close_training(self) -> None:
        if self._training is not None:
            self._training.close()
        self._training = None

    def _convert_table(self) -> None:
        """Use the type of the weight, which `model.double()` changes."""
        dtype, settings = _table_dtype(self.weight.dtype), self._table.settings
        if dtype == settings.dtype:
            return
        if self._table.step > 0 or not isinstance(self._table, Table):
            raise TableError(
                expected=f"a table in {settings.dtype}, which has trained",
                found=f"its model in {dtype}",
                fix="convert the model before its first training step",
            )
        self._table = Table(dataclasses.replace(settings, dtype=dtype))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it has a table of its own, which another job may share again."""
        return {**self.__dict__, "_table": self._copy_table(), **dict.fromkeys(("_training", "_lookups", "_shared"))}

    def _copy_table(self) -> Table:
        if isinstance(self._table, Table):
            return self._table
        table = Table(self._table.settings)
        table.restore(self._table.contents())
        return table


def _table_dtype(dtype: torch.dtype) -> Literal["float32", "float64"]:
    if dtype == torch.float32:
        return "float32"
    if dtype == torch.float64:
        return "float64"
    raise TableError(expected="a table in torch.float32 or torch.float64", found=dtype, fix="pass dtype=torch.float32")
