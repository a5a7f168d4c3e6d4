"""Without how many killed workers a run can go on."""

from collections.abc import Sequence

from rankless.config.backends import BackendChoice
from rankless.config.run_config import RunConfig, RunObservation
from rankless.config.shared_memory_support import is_supported

ABORTABLE = ("shared_memory", "hierarchical")
"""The backends whose groups a worker can end for all others, so that none waits for a lost one."""


def count_most_lost(config: RunConfig, devices: Sequence[Sequence[str]]) -> int:
    """Return without how many killed workers the others can go on: 0 where a step needs every worker.

    Args:
        config: What to run, on host 0.
        devices: For each host, the torch device of each of its workers.
    """
    servers = config.servers
    if servers is None or servers.mode != "sync" or config.mesh or config.plan is not None:
        return 0
    is_observed = config.recording is not None or config.observation != RunObservation()
    if is_observed or any(device != "cpu" for on_host in devices for device in on_host):
        return 0
    most = sum(map(len, devices)) - 1
    return most if servers.lost_workers is None else min(most, servers.lost_workers)


def choose_abortable_backend(chosen: BackendChoice, config: RunConfig) -> BackendChoice:
    """Return a backend whose groups can be ended for all workers, if the run may lose some.

    Args:
        chosen: The backend of a run that loses none.
        config: What to run.
    """
    if chosen.name in ABORTABLE or config.backend is not None or not is_supported():
        return chosen
    return BackendChoice("hierarchical", "workers may be lost, on several hosts")
