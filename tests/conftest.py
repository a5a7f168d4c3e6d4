"""What every test shares. Its place puts `tests/` on the path, so that `from processes import on_mesh` works."""

from collections.abc import Iterator

import pytest
from processes import close_pools


@pytest.fixture(scope="session", autouse=True)
def _worker_pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
