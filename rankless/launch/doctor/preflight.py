"""The quick checks that run on every host before each job on several hosts, in a fraction of a second."""

from collections.abc import Callable

from rankless.config.run_config import RunConfig
from rankless.errors import JoinError
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.launch.doctor.single_host_checks import check_host_quickly


def run_preflight(config: RunConfig, warn: Callable[[str], None]) -> None:
    """Check this host before a job on several hosts.

    Args:
        config: The job's configuration; its `cluster` is set.
        warn: Receives one line with all warnings.

    Raises:
        JoinError: If a check finds something that would make the job fail.
    """
    cluster = config.cluster
    assert cluster is not None
    # If the hosts are only counted, the address of host 0 is known, and only to the other hosts.
    known = cluster.hosts if cluster.is_listed else cluster.hosts[:1]
    if cluster.agent_start == "slurm":
        known = ()  # several tasks may share host 0, so that its name leads here
    results = check_host_quickly(
        CheckHost(
            name=cluster.hosts[cluster.host_index].address,
            others=tuple(host.address for place, host in enumerate(known) if place != cluster.host_index),
            is_first=cluster.host_index == 0,
            has_several=True,
            workers=config.worker_count,
            port=cluster.port,
            log_folder=config.log_folder,
        )
    )
    warnings = [f"{result.name}: {result.seen}" for result in results if result.status == "warn"]
    if warnings:
        warn(f"{'; '.join(warnings)} (rankless doctor shows the fix)")
    failures = [result for result in results if result.status == "fail"]
    if failures:
        raise JoinError(
            expected=f"{cluster.hosts[cluster.host_index]} to pass the checks for a job on several hosts",
            found="; ".join(f"{result.name}: {result.seen}" for result in failures),
            fix="; ".join(result.fix for result in failures) + " (rankless doctor checks more)",
        )
