"""Paddle's endpoints: an address and a port of every rank, at which a script may let ranks meet. We do not use them."""

import contextlib
from collections.abc import Iterator, Sequence

from rankless.config.fleetrun import FIRST_PORT, endpoint
from rankless.config.run_config import RunConfig
from rankless.launch.ports import reserve_master_port


@contextlib.contextmanager
def free_endpoints(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Those of this host's workers, kept from everybody but them; none where the program knows nothing of Paddle."""
    if config.fleet is None:
        yield ()
        return
    address, first = config.hosts.master_address, config.fleet.first_port
    with contextlib.ExitStack() as stack:
        if first is not None:
            yield endpoints_of(config, [address], [config.worker_count])
        else:
            kept = [stack.enter_context(reserve_master_port()) for _ in range(config.worker_count)]
            yield tuple(endpoint(address, each.getsockname()[1]) for each in kept)


def endpoints_of(config: RunConfig, addresses: Sequence[str], workers: Sequence[int]) -> tuple[str, ...]:
    """Those of all hosts, by rank: on each, ports from the first one on, as Paddle counts them."""
    if config.fleet is None:
        return ()
    first = config.fleet.first_port or FIRST_PORT
    hosts = zip(addresses, workers, strict=True)
    return tuple(endpoint(address, first + number) for address, count in hosts for number in range(count))
