"""Horovod's settings: its environment variables, read when a process joins."""

from collections.abc import Mapping
from dataclasses import dataclass

MEGABYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What Horovod's variables say, those that mean something here."""

    cache_capacity: int = 1024
    fusion_bytes: int = 128 * MEGABYTE
    cycle_seconds: float = 0.0
    """How long what is ready waits for more to go with it. By default nothing waits while nothing is under way."""
    splits_groups: bool = False
    reduces_by_hosts: bool = True
    """Whether ranks of several hosts reduce within their hosts first: what Horovod calls hierarchical, and torus."""
    timeline: str = ""
    """A file; DYNAMIC lets the script start and stop it."""
    marks_cycles: bool = False
    stall_seconds: float = 60.0
    """After how long what some ranks have not submitted is told; 0: never."""
    stall_shutdown_seconds: float = 0.0
    timeout_seconds: float = 30.0
    """How long an operation may take once all ranks have submitted it."""
    start_timeout_seconds: float = 600.0
    dynamic_process_sets: bool = False


def read_settings(variables: Mapping[str, str]) -> Settings:
    """The settings in `HOROVOD_` variables, given without that prefix. What is no number is as if it were not set."""

    def number(name: str, default: float) -> float:
        try:
            return float(variables.get(name, ""))
        except ValueError:
            return default

    def switch(name: str) -> bool:
        return variables.get(name, "").lower() not in ("", "0", "false")

    plain, layouts = Settings(), ("HIERARCHICAL_ALLREDUCE", "TORUS_ALLREDUCE")
    return Settings(
        cache_capacity=int(number("CACHE_CAPACITY", plain.cache_capacity)),
        fusion_bytes=int(number("FUSION_THRESHOLD", plain.fusion_bytes)),
        cycle_seconds=number("CYCLE_TIME", 0.0) / 1000,
        splits_groups=switch("DISABLE_GROUP_FUSION"),
        reduces_by_hosts=any(map(switch, layouts)) or not any(map(variables.get, layouts)),
        timeline=variables.get("TIMELINE", ""),
        marks_cycles=switch("TIMELINE_MARK_CYCLES"),
        stall_seconds=0.0 if switch("STALL_CHECK_DISABLE") else number("STALL_CHECK_TIME_SECONDS", plain.stall_seconds),
        stall_shutdown_seconds=number("STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeout_seconds=number("GLOO_TIMEOUT_SECONDS", plain.timeout_seconds),
        start_timeout_seconds=number("START_TIMEOUT", plain.start_timeout_seconds),
        dynamic_process_sets=switch("DYNAMIC_PROCESS_SETS"),
    )
