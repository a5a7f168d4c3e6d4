"""Horovod's settings, which `hvd.init` reads from its environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass

MEGABYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of Horovod that have an effect in Rankless."""

    cache_capacity: int = 1024
    fusion_bytes: int = 128 * MEGABYTE
    cycle_seconds: float = 0.0
    """The shortest time between two batches. By default an operation does not wait while rank 0 is idle."""
    outstanding_seconds: float = 0.001
    """How long an operation with a result is still outstanding, for `poll` and for its name, unless a call of
    `synchronize` takes the result. It is one cycle."""
    splits_groups: bool = False
    reduces_by_hosts: bool = True
    """Whether ranks of several hosts reduce within their hosts first. Horovod calls this hierarchical, or torus."""
    timeline: str = ""
    """The file to write. DYNAMIC lets the script start and stop the timeline."""
    marks_cycles: bool = False
    stall_seconds: float = 60.0
    """When to warn about an operation that some ranks have not submitted. 0 never warns."""
    stall_shutdown_seconds: float = 0.0
    timeout_seconds: float = 30.0
    """How long an operation may take after all ranks have submitted it."""
    start_timeout_seconds: float = 600.0
    dynamic_process_sets: bool = False


def read_settings(variables: Mapping[str, str]) -> Settings:
    """Read the settings from `HOROVOD_` variables, given without that prefix. Invalid numbers count as not set."""

    def read_number(name: str, default: float) -> float:
        try:
            return float(variables.get(name, ""))
        except ValueError:
            return default

    def read_flag(name: str) -> bool:
        return variables.get(name, "").lower() not in ("", "0", "false")

    defaults, layouts = Settings(), ("HIERARCHICAL_ALLREDUCE", "TORUS_ALLREDUCE")
    return Settings(
        cache_capacity=int(read_number("CACHE_CAPACITY", defaults.cache_capacity)),
        fusion_bytes=int(read_number("FUSION_THRESHOLD", defaults.fusion_bytes)),
        cycle_seconds=read_number("CYCLE_TIME", 0.0) / 1000,
        outstanding_seconds=read_number("CYCLE_TIME", defaults.outstanding_seconds * 1000) / 1000,
        splits_groups=read_flag("DISABLE_GROUP_FUSION"),
        reduces_by_hosts=any(map(read_flag, layouts)) or not any(map(variables.get, layouts)),
        timeline=variables.get("TIMELINE", ""),
        marks_cycles=read_flag("TIMELINE_MARK_CYCLES"),
        stall_seconds=0.0
        if read_flag("STALL_CHECK_DISABLE")
        else read_number("STALL_CHECK_TIME_SECONDS", defaults.stall_seconds),
        stall_shutdown_seconds=read_number("STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeout_seconds=read_number("GLOO_TIMEOUT_SECONDS", defaults.timeout_seconds),
        start_timeout_seconds=read_number("START_TIMEOUT", defaults.start_timeout_seconds),
        dynamic_process_sets=read_flag("DYNAMIC_PROCESS_SETS"),
    )
