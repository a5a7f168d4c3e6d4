"""The texts that the agent writes on the terminal: a table of workers at the start, the failed rank at the end."""

import os
from collections.abc import Sequence

from rankless.config.run_config import RunConfig
from rankless.launch.supervisor.failure_attribution import Verdict

_TRACEBACK_LINES = 9
_MAX_LINE_CHARS = 300


def format_start_table(config: RunConfig, *, folder: str, log_files: Sequence[str], has_error_files: bool) -> str:
    """Return a table with the rank, the device and the log file of every worker of one host.

    With `has_error_files` a worker has two log files, and the table shows their folder.
    """
    count, threads = config.worker_count, format_count(config.threads_per_worker, "thread")
    start = "" if config.warm else ", plain processes"
    seed = "" if config.seed is None else f", seed {config.seed}"
    lines = [
        f"rankless: {format_count(count, 'worker')}, {threads} each{seed}{start}, logs in {folder}",
        f"  {'rank':>4}  {'device':<8}  log file{'s' if has_error_files else ''}",
    ]
    if has_error_files:
        log_files = [os.path.join(os.path.dirname(path), "") for path in log_files]
    lines += [
        f"  {rank:>4}  {device:<8}  {path}"
        for rank, (device, path) in enumerate(zip(config.devices, log_files, strict=True))
    ]
    gpus = {device for device in config.devices if device != "cpu"}
    if gpus and len(gpus) < count and not has_error_files:
        lines.append(f"  {count} workers share {format_count(len(gpus), 'GPU')}, so they use Gloo instead of NCCL")
    return "\n".join(lines) + "\n"


def format_hosts_table(
    config: RunConfig, *, folder: str, rows: Sequence[tuple[str, str]], log_files: Sequence[str]
) -> str:
    """Return a table of all workers of several hosts; a row of `rows` is the host and the device of one rank."""
    hosts = list(dict.fromkeys(host for host, _ in rows))
    counts = f"{format_count(len(rows), 'worker')} on {format_count(len(hosts), 'host')}"
    seed = "" if config.seed is None else f", seed {config.seed}"
    width = max(map(len, hosts))
    lines = [
        f"rankless: {counts}{seed}, logs in {folder} on each",
        f"  {'rank':>4}  {'host':<{width}}  {'device':<8}  log file",
    ]
    lines += [
        f"  {rank:>4}  {host:<{width}}  {device:<8}  {path}"
        for rank, ((host, device), path) in enumerate(zip(rows, log_files, strict=True))
    ]
    return "\n".join(lines) + "\n"


def format_failure(verdict: Verdict, *, log_file: str, host: str = "", report: str = "") -> str:
    """Return at most 15 lines about the root cause of a failure.

    They name the rank, its host, what happened, the last lines of the traceback, and the log file. `report` is the file
    on that host which holds the same text.
    """
    there = f", this report {report} there" if report else ""
    if verdict.cause in ("host", "interrupted"):
        return f"rankless: {verdict.headline}\nrankless: the job was ended, exit code {verdict.exit_code}\n"
    on_host = f" on {host}" if host else ""
    lines = [f"rankless: rank {verdict.root_cause_rank}{on_host} {verdict.headline}"]
    trace = verdict.traceback.rstrip().splitlines()
    if len(trace) > _TRACEBACK_LINES:
        lines.append("    ...")
    lines += [f"    {line[:_MAX_LINE_CHARS]}" for line in trace[-_TRACEBACK_LINES:]]
    lines.append(
        f"rankless: its log file is {log_file}{on_host}{there}; the job was ended, exit code {verdict.exit_code}"
    )
    return "\n".join(lines) + "\n"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
