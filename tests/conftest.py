"""What every test shares. Its place puts `tests/` on the path, for `from processes import on_mesh`."""

import gc
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from support.devices import use_test_device
from support.processes import close_pools
from support.warm_runs import close_fork_server_pool

use_test_device()  # before test files make tensors when they are imported


@pytest.fixture(scope="session", autouse=True)
def _what_is_shared_ends_with_the_session() -> Iterator[None]:
    yield
    close_pools()
    close_fork_server_pool()


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections: tests ask for hundreds of them, at 0.3 s each.

    Collections that nobody asks for are rarer: at Python's thresholds they are a tenth of the compiler's tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no items of exhaustive functions where they are left out: these are 8,000 of 23,000 cases."""
    if collector.config.option.markexpr != "not exhaustive" or any("::" in word for word in collector.config.args):
        return None
    if not collector.istestfunction(obj, name):
        return None
    marks = [mark.name for mark in getattr(obj, "pytestmark", ())]
    return [] if "exhaustive" in marks or collector.get_closest_marker("exhaustive") is not None else None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread as the workers of `on_mesh` do, because sums over several threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive what `ci_sample(count)` leaves out: all but `count` cases, evenly spread, of a test."""
    sampled: defaultdict[tuple[str, str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("ci_sample")
        if marker is not None and item.get_closest_marker("exhaustive") is None:
            name = getattr(item, "originalname", item.name)
            sampled[str(item.path), name, marker.args[0]].append(item)
    for (*_, count), cases in sampled.items():
        kept = {len(cases) * number // count for number in range(count)}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker(pytest.mark.exhaustive)
