"""The texts that the agent writes on the terminal: a table of workers at the start, a line at the end.

`failure_report` has the text about a failed rank.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankless.config.meaning_of_extension_options import describe_processes
from rankless.config.run_config import RunConfig
from rankless.records.events import WorkerCut
from rankless.records.live_run import ProcessRow
from rankless.records.number_formatting import (
    format_bytes,
    format_count,
    format_ranks,
    format_sample_rate,
    format_seconds,
)
from rankless.records.run_json_format import RunSummary

MAX_LINE_CHARS = 300
MAX_SECONDARY_LINES = 8


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """What the table at the start shows of one worker."""

    rank: int
    process_id: int | None
    """None: the worker has not started yet."""
    device: str
    log_file: str
    host: str = ""


def format_start_line(config: RunConfig, *, folder: str) -> str:
    """Return the first line about the workers of a job on one host."""
    workers = _format_kinds(config, config.worker_count)
    threads = format_count(config.threads_per_worker, "thread")
    start = "" if config.request.warm else ", plain processes"
    seed = "" if config.seed is None else f", seed {config.seed}"
    return f"rankless: {workers}, {threads} each{_describe_others(config)}{seed}{start}, logs in {folder}\n"


def format_hosts_line(config: RunConfig, *, folder: str, worker_count: int, host_count: int) -> str:
    """Return the first line about the workers of a job on several hosts."""
    counts = f"{_format_kinds(config, worker_count)} on {format_count(host_count, 'host')}"
    seed = "" if config.seed is None else f", seed {config.seed}"
    return f"rankless: {counts}{_describe_others(config)}{seed}, logs in {folder} on each\n"


def _format_kinds(config: RunConfig, worker_count: int) -> str:
    """Return the number of all workers, or of those of each kind with the ranks of the heterogeneous ones."""
    ranks = next((axis.stage_workers[1] for axis in config.mesh if axis.stage_workers), ())
    workers = format_count(worker_count - len(ranks), "worker")
    if not ranks:
        return workers
    return f"{workers} and {format_count(len(ranks), 'heterogeneous worker')} ({format_ranks(ranks)})"


def _describe_others(config: RunConfig) -> str:
    """Return the processes beside the workers, as ", 2 servers"; "" without any."""
    return "".join(f", {text}" for text in describe_processes(config.request))


def format_worker_table(rows: Sequence[WorkerRow], *, has_error_files: bool = False) -> str:
    """Return a table of all workers of a job, in the order of their ranks.

    With `has_error_files` a worker has two log files, and the table shows their folder.
    """
    host_width = max(len(row.host) for row in rows)
    host_column = host_width + 2 if host_width else 0
    id_width = max(3, *(len(_format_id(row)) for row in rows))
    lines = [
        f"  {'rank':>4}  {'host'[:host_width]:<{host_column}}{'pid':>{id_width}}  {'device':<8}  "
        f"log file{'s' if has_error_files else ''}"
    ]
    for row in rows:
        path = os.path.join(os.path.dirname(row.log_file), "") if has_error_files else row.log_file
        lines.append(
            f"  {row.rank:>4}  {row.host:<{host_column}}{_format_id(row):>{id_width}}  {row.device:<8}  {path}"
        )
    return "\n".join(lines) + "\n"


def format_process_table(rows: Sequence[ProcessRow], *, hosts: Sequence[str] | None = None) -> str:
    """Return a table of all processes of a job beside its workers; "" if it has workers alone.

    `hosts` names the host of each, if there are several.
    """
    if not rows:
        return ""
    id_width = max(3, *(len(str(row.process_id)) for row in rows))
    address_width = max(len(row.address) for row in rows)
    names = [""] * len(rows) if hosts is None else hosts
    host_width = 0 if hosts is None else max(4, *map(len, hosts)) + 2
    copies = ["" if row.copy_of is None else str(row.copy_of) for row in rows]
    copy_width = len("copy of") + 2 if any(copies) else 0
    head = f"{'copy of'[:copy_width]:<{copy_width}}{'host'[:host_width]:<{host_width}}{'pid':>{id_width}}"
    roles = list(dict.fromkeys(row.role for row in rows))
    # A table of one role has it in the heading, as that of workers has "rank".
    title = roles[0] if len(roles) == 1 else "process"
    numbers = [str(row.index) if len(roles) == 1 else f"{row.role} {row.index}" for row in rows]
    width = max(6, len(title), *map(len, numbers))
    lines = [f"  {title:>{width}}  {head}  {'address':<{address_width}}  log file"]
    lines += [
        f"  {number:>{width}}  {copy:<{copy_width}}{name:<{host_width}}{row.process_id:>{id_width}}  "
        f"{row.address:<{address_width}}  {row.log_file}"
        for row, number, name, copy in zip(rows, numbers, names, copies, strict=True)
    ]
    return "\n".join(lines) + "\n"


def format_processes(names: Iterable[tuple[str, int]]) -> str:
    """Return processes beside the workers as ", servers 0 and 1"; "" for none."""
    found = ""
    for role, group in itertools.groupby(names, key=lambda name: name[0]):
        *others, last = (str(number) for _, number in group)
        found += f", {role}s {', '.join(others)} and {last}" if others else f", {role} {last}"
    return found


def format_shared_gpus(devices: Sequence[str]) -> str:
    """Return a line if workers of one host share GPUs, else ""."""
    gpus = {device for device in devices if device != "cpu"}
    if not gpus or len(gpus) == len(devices):
        return ""
    return f"  {len(devices)} workers share {format_count(len(gpus), 'GPU')}, so they use Gloo instead of NCCL\n"


def _format_id(row: WorkerRow) -> str:
    return "-" if row.process_id is None else str(row.process_id)


def format_cuts(cut: Sequence[WorkerCut]) -> str:
    """Return a line for each worker that was killed before it had ended, because its time was over."""
    lines = [
        f"rankless: rank {record.rank} had not ended {format_seconds(record.after_seconds)} after the signal, and was "
        f"killed{f' in {record.doing[:MAX_LINE_CHARS]}' if record.doing else ''}"
        for record in cut[:MAX_SECONDARY_LINES]
    ]
    if len(cut) > len(lines):
        lines.append(f"rankless: so {'was' if len(cut) == len(lines) + 1 else 'were'} {len(cut) - len(lines)} more")
    return "".join(f"{line}\n" for line in lines)


def format_summary(summary: RunSummary, *, folder: str) -> str:
    """Return one line about a run that has ended: its time, steps, rate, peak memory and log folder."""
    starts = {"succeeded": "done in", "failed": "failed after", "preempted": "preempted (exit code 75) after"}
    start = starts.get(summary.outcome, f"{summary.verdict} after")
    facts = [] if not summary.steps else [format_count(summary.steps, "step")]
    if summary.samples_per_second:
        facts.append(format_sample_rate(summary.samples_per_second))
    for name, key in (("peak memory", "peak_memory_bytes"), ("GPU memory", "peak_gpu_memory_bytes")):
        peaks = [(peak, each.rank) for each in summary.ranks if (peak := getattr(each, key)) is not None]
        if peaks:
            peak, rank = max(peaks, key=lambda each: each[0])
            facts.append(f"{name} {format_bytes(peak)}" + (f" (rank {rank})" if len(summary.ranks) > 1 else ""))
    facts.append(f"logs in {folder}")
    return f"rankless: {start} {format_seconds(summary.seconds or 0.0)}: {', '.join(facts)}\n"
