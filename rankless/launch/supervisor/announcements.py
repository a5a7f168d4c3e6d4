"""What the agent itself writes on the terminal: the table at the start, and who failed at the end."""

import os
from collections.abc import Sequence

from rankless.config.run_config import RunConfig
from rankless.launch.supervisor.failure_attribution import Verdict

_TRACEBACK_LINES = 9
_LONGEST_LINE = 300


def start_table(config: RunConfig, *, folder: str, log_files: Sequence[str]) -> str:
    """Rank, device and log file of every worker, or the folder of its two."""
    count, threads = config.worker_count, config.threads_per_worker
    start = "" if config.warm else ", plain processes"
    has_two = config.foreign is not None or config.horovod is not None
    seed = "" if config.seed is None else f", seed {config.seed}"
    lines = [
        f"rankless: {counted(count, 'worker')}, {counted(threads, 'thread')} each{seed}{start}, logs in {folder}",
        f"  {'rank':>4}  {'device':<8}  log file{'s' if has_two else ''}",
    ]
    if has_two:
        log_files = [os.path.join(os.path.dirname(path), "") for path in log_files]
    lines += [
        f"  {rank:>4}  {device:<8}  {path}"
        for rank, (device, path) in enumerate(zip(config.devices, log_files, strict=True))
    ]
    gpus = {device for device in config.devices if device != "cpu"}
    if gpus and len(gpus) < count and not has_two:
        lines.append(f"  {count} workers share {counted(len(gpus), 'GPU')}, so they talk through Gloo, not NCCL")
    return "\n".join(lines) + "\n"


def hosts_table(config: RunConfig, *, folder: str, rows: Sequence[tuple[str, str]], log_files: Sequence[str]) -> str:
    """Rank, host, device and log file of every worker of several hosts."""
    hosts = list(dict.fromkeys(host for host, _ in rows))
    seed = "" if config.seed is None else f", seed {config.seed}"
    width = max(map(len, hosts))
    lines = [
        f"rankless: {counted(len(rows), 'worker')} on {counted(len(hosts), 'host')}{seed}, logs in {folder} on each",
        f"  {'rank':>4}  {'host':<{width}}  {'device':<8}  log file",
    ]
    lines += [
        f"  {rank:>4}  {host:<{width}}  {device:<8}  {path}"
        for rank, ((host, device), path) in enumerate(zip(rows, log_files, strict=True))
    ]
    return "\n".join(lines) + "\n"


def failure(verdict: Verdict, *, log_file: str, host: str = "", report: str = "") -> str:
    """At most 15 lines: who, on which host, what, the last lines of its traceback, its log file, and the file with the
    same words there.
    """
    there = f", this report {report} there" if report else ""
    if verdict.cause in ("host", "told"):
        return f"rankless: {verdict.headline}\nrankless: the job was ended, exit code {verdict.exit_code}\n"
    on_host = f" on {host}" if host else ""
    lines = [f"rankless: rank {verdict.culprit}{on_host} {verdict.headline}"]
    trace = verdict.traceback.rstrip().splitlines()
    if len(trace) > _TRACEBACK_LINES:
        lines.append("    ...")
    lines += [f"    {line[:_LONGEST_LINE]}" for line in trace[-_TRACEBACK_LINES:]]
    lines.append(
        f"rankless: its log file is {log_file}{on_host}{there}; the job was ended, exit code {verdict.exit_code}"
    )
    return "\n".join(lines) + "\n"


def horovod_sentence(verdict: Verdict) -> str:
    """How horovodrun says that a process has failed."""
    return (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. "
        f"The first process to do so was:\nProcess name: {verdict.culprit}\nExit code: {verdict.exit_code}\n"
    )


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it needs it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
