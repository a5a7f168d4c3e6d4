"""The part of the doctor that runs before every job on several hosts, on each of them: a fraction of a second."""

from collections.abc import Callable

from rankless.config.run_config import RunConfig
from rankless.errors import JoinError
from rankless.launch.doctor.host_checks import look_quickly
from rankless.launch.doctor.probe_protocol import Look


def quick_check(config: RunConfig, tell: Callable[[str], None]) -> None:
    """Tell what may trouble a job on several hosts on this one; raise JoinError for what it would not survive."""
    cluster = config.cluster
    assert cluster is not None
    # Of hosts that are only counted, host 0's address is known, and to the others alone.
    known = cluster.hosts if cluster.is_listed else cluster.hosts[:1]
    rows = look_quickly(
        Look(
            name=cluster.hosts[cluster.host_index].address,
            others=tuple(host.address for place, host in enumerate(known) if place != cluster.host_index),
            is_first=cluster.host_index == 0,
            has_several=True,
            workers=config.worker_count,
            port=cluster.port,
            log_folder=config.log_folder,
        )
    )
    warnings = [f"{row.name}: {row.seen}" for row in rows if row.status == "warn"]
    if warnings:
        tell(f"{'; '.join(warnings)} (rankless doctor tells the fix)")
    failures = [row for row in rows if row.status == "fail"]
    if failures:
        raise JoinError(
            expected=f"{cluster.hosts[cluster.host_index]} to be fit for a job on several hosts",
            found="; ".join(f"{row.name}: {row.seen}" for row in failures),
            fix="; ".join(row.fix for row in failures) + " (rankless doctor looks further)",
        )
