"""What every test shares. Its place puts `tests/` on the path, for `from processes import on_mesh`."""

from collections.abc import Iterator

import pytest
from processes import close_pools


@pytest.fixture(scope="session", autouse=True)
def _worker_pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
