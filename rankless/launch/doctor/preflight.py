"""The part of the doctor that runs before every job on several hosts, on each of them: a fraction of a second."""

from collections.abc import Callable

from rankless.config.run_config import RunConfig
from rankless.errors import JoinError
from rankless.launch.doctor.host_checks import check_host_quickly
from rankless.launch.doctor.probe_protocol import CheckHost


def run_preflight(config: RunConfig, warn: Callable[[str], None]) -> None:
    """Tell what may trouble a job on several hosts on this one; raise JoinError for what it would not survive."""
    cluster = config.cluster
    assert cluster is not None
    # Of hosts that are only counted, host 0's address is known, and to the others alone.
    known = cluster.hosts if cluster.is_listed else cluster.hosts[:1]
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
        warn(f"{'; '.join(warnings)} (rankless doctor tells the fix)")
    failures = [result for result in results if result.status == "fail"]
    if failures:
        raise JoinError(
            expected=f"{cluster.hosts[cluster.host_index]} to be fit for a job on several hosts",
            found="; ".join(f"{result.name}: {result.seen}" for result in failures),
            fix="; ".join(result.fix for result in failures) + " (rankless doctor looks further)",
        )
