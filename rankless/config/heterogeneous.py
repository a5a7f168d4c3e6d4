"""Workers of two kinds in one run: those that look rows up on the CPU, and heterogeneous ones for the dense part."""

from rankless.config.run_config import Cluster, RunRequest
from rankless.errors import ConfigError
from rankless.records.parallel_plan import PlannedAxis


def make_heterogeneous_mesh(workers: int, heterogeneous: int) -> tuple[PlannedAxis, ...]:
    """Return the mesh of a run with heterogeneous workers, which have the last ranks.

    Args:
        workers: The number of all workers.
        heterogeneous: The number of those that are heterogeneous.
    """
    first = workers - heterogeneous
    kinds = (tuple(range(first)), tuple(range(first, workers)))
    return (PlannedAxis(name="pipeline", role="pipeline", size=workers, stage_workers=kinds),)


def check_heterogeneous(request: RunRequest, cluster: Cluster | None) -> None:
    """Raise `ConfigError` for heterogeneous workers that no run can have."""
    count = request.heterogeneous_workers
    if not count:
        return
    other = _find_conflict(request, cluster)
    if count < 0 or count >= request.worker_count:
        raise ConfigError(
            expected="workers and heterogeneous workers, at least 1 of each",
            found=f"{request.worker_count - count} and {count}",
            fix="give --workers and --heter-workers numbers from 1 up",
        )
    if other is not None:
        raise ConfigError(
            expected="heterogeneous workers on one host, in the mode sync, without --mesh and --plan",
            found=other,
            fix="omit it, or omit --heter-workers",
        )


def _find_conflict(request: RunRequest, cluster: Cluster | None) -> str | None:
    """Return what a request has that heterogeneous workers do not go with, if it has any."""
    if cluster is not None:
        return f"{len(cluster.hosts)} hosts"
    if request.servers is not None and request.servers.mode != "sync":
        return f"--server-mode {request.servers.mode}"
    if request.mesh or request.plan is not None:
        return "--mesh" if request.mesh else "--plan"
    return "an elastic job" if request.elastic is not None else None
