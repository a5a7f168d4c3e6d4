"""What every test shares. Its place puts `tests/` on the path, for `from processes import on_mesh`."""

from collections.abc import Iterator

import pytest
from support.processes import close_pools
from support.warm_runs import close_fork_server_pool


@pytest.fixture(scope="session", autouse=True)
def _what_is_shared_ends_with_the_session() -> Iterator[None]:
    yield
    close_pools()
    close_fork_server_pool()
