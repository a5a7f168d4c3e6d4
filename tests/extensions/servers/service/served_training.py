"""A training on served tables by several workers, and the same one on a table in this process."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankless.extensions.servers.tables.optimizers import (
    AdagradSettings,
    OptimizerSettings,
    SgdSettings,
    SparseAdamSettings,
)
from rankless.extensions.servers.tables.settings import ByCount, ByHash, TableSettings, Uniform
from rankless.extensions.servers.tables.table import Table

LIMITS = np.iinfo(np.int64)
VOCABULARY = np.concatenate((np.arange(-40, 40), [LIMITS.min, LIMITS.max, LIMITS.min + 1, 2**40]))
OPTIMIZERS: dict[str, OptimizerSettings] = {
    "sgd": SgdSettings(lr=0.1),
    "momentum": SgdSettings(lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": AdagradSettings(lr=0.1, lr_decay=0.01),
    "sparse_adam": SparseAdamSettings(lr=0.05),
}
TABLES: dict[str, dict[str, Any]] = {
    "every_id": {},
    "by_count": {"admission": ByCount(occurrences=3)},
    "by_hash": {"admission": ByHash(fraction=0.5), "seed": 2**64 - 1},
    "expiring": {"expire_after_steps": 3, "admission": ByCount(occurrences=2)},
    "capped": {"max_rows": 64},
    "tiny": {"max_rows": 20, "initial": Uniform(low=-1, high=1)},
}


class SliceOfStep(NamedTuple):
    """One worker's part of a step."""

    ids: np.ndarray
    occurrences: np.ndarray
    gradients: np.ndarray


def table_settings(name: str, dim: int = 3) -> TableSettings:
    return TableSettings(dim=dim, dtype="float64", **TABLES[name])


def draw_slice(generator: np.random.Generator, dim: int = 3, most: int = 12) -> SliceOfStep:
    count = int(generator.integers(0, most))
    ids = generator.choice(VOCABULARY, count, replace=False)
    return SliceOfStep(ids, generator.integers(0, 4, count), generator.normal(size=(count, dim)))


def push_sum(table: Table, slices: Sequence[SliceOfStep], settings: OptimizerSettings) -> None:
    """What one device would have done with the whole batch."""
    ids = np.concatenate([each.ids for each in slices])
    distinct, places = np.unique(ids, return_inverse=True)
    occurrences = np.zeros(len(distinct), np.int64)
    gradients = np.zeros((len(distinct), table.settings.dim), table.settings.dtype)
    np.add.at(occurrences, places, np.concatenate([each.occurrences for each in slices]))
    np.add.at(gradients, places, np.concatenate([each.gradients for each in slices]))
    table.push(distinct, occurrences, gradients, settings)


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call functions at the same time, each in a thread, and return what they return.

    The error of one is raised at once: the others may wait for it, in threads that are left behind.
    """
    results: list[Any] = [None] * len(functions)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def call(place: int) -> None:
        try:
            results[place] = functions[place]()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    for place in range(len(functions)):
        threading.Thread(target=call, args=(place,), daemon=True).start()
    for _ in functions:
        error = ended.get(timeout=60)
        if error is not None:
            raise error
    return results


def assert_equal_contents(found, expected, bound: float = 1e-12) -> None:
    assert found.step == expected.step
    assert (found.optimizer, found.optimizer_steps) == (expected.optimizer, expected.optimizer_steps)
    for name in ("ids", "used_steps", "waiting_ids", "waiting_occurrences", "waiting_steps"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.rows, expected.rows, rtol=0, atol=bound)
