"""Paddle's endpoints: an address and a port of every rank, at which a script may let ranks meet. We do not use them."""

import contextlib
from collections.abc import Iterator, Sequence

from rankless.launch.ports import reserve_master_port
from rankless.plan.fleet import FIRST_PORT, endpoint
from rankless.plan.run_plan import RunPlan


@contextlib.contextmanager
def free_endpoints(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    """Those of this host's workers, kept from everybody but them; none where the program knows nothing of Paddle."""
    if plan.fleet is None:
        yield ()
        return
    address, first = plan.hosts.master_address, plan.fleet.first_port
    with contextlib.ExitStack() as stack:
        if first is not None:
            yield endpoints_of(plan, [address], [plan.worker_count])
        else:
            kept = [stack.enter_context(reserve_master_port()) for _ in range(plan.worker_count)]
            yield tuple(endpoint(address, each.getsockname()[1]) for each in kept)


def endpoints_of(plan: RunPlan, addresses: Sequence[str], workers: Sequence[int]) -> tuple[str, ...]:
    """Those of all hosts, by rank: on each, ports from the first one on, as Paddle counts them."""
    if plan.fleet is None:
        return ()
    first = plan.fleet.first_port or FIRST_PORT
    hosts = zip(addresses, workers, strict=True)
    return tuple(endpoint(address, first + number) for address, count in hosts for number in range(count))
