"""What a worker changes in a transaction."""

from typing import NamedTuple

from rankless.extensions.servers.tables.row_gradients import RowGradients


class WorkerChange(NamedTuple):
    """One push or reset of one worker.

    Args:
        table: Number of the table.
        text: What it does, for people. Equal for all workers.
        settings: Settings of the optimizer as JSON. Empty: reset the optimizer's states.
        gradient_slice: The worker's slice of the gradients. None: reset.
        reset: How many resets of the table the worker has asked for, with this one. 0: it is a push.
        factor: By what the gradients that the worker has prepared were multiplied; see Note [prepared slices]. None:
            they came with the push.
    """

    table: int
    text: str
    settings: bytes
    gradient_slice: RowGradients | None
    reset: int = 0
    factor: float | None = None


class LostWorkerChange(NamedTuple):
    """One push that a lost worker would have made, as another worker knows it.

    Args:
        worker: The lost worker.
        number: The number of the push among the worker's changes in the transaction, from 0 on.
        gradients: The lost worker's slice of the gradients.
    """

    worker: int
    number: int
    gradients: RowGradients
