"""The status of a run as text: a heading, a table of workers, one of other processes, and one of tables of rows."""

from collections.abc import Sequence

from rankless.records.number_formatting import format_bytes, format_count, format_seconds
from rankless.records.run_status import RunStatus, ServerReport, WorkerReport
from rankless.records.server_traffic_counters import TableActivity
from rankless.user_code import shorten_path

_MOST_PROGRAM_CHARACTERS = 100
_UNKNOWN = "-"


def format_status(status: RunStatus, *, script: str | None, arguments: Sequence[str]) -> str:
    """Return the status of a run as lines.

    Args:
        status: The status.
        script: The run's program, as on the command line.
        arguments: The program's arguments.
    """
    lines = [f"{status.run_id}: {_format_program(script, arguments)}", f"  {_format_state(status)}"]
    if status.outcome == "running":
        lines += [f"  {_format_figures(status)}", *_format_workers(status), *_format_processes(status.servers)]
        lines += _format_elsewhere(status)
        lines += [f"  {each.text}" for each in status.slow_ranks]
        lines += [f"  host {name} was lost, and the run continues without it" for name in status.lost_hosts]
    else:
        lines.append(f"  {_format_figures(status)}")
    # Names of tables, paths and reasons of refusals may have any character.
    return "".join("".join(each if each.isprintable() else "?" for each in line) + "\n" for line in lines)


def format_table(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> list[str]:
    """Return lines with columns of equal width, of which those with the numbers `right` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _format_program(script: str | None, arguments: Sequence[str]) -> str:
    text = " ".join([script or "a program that its run.json does not name", *arguments])
    text = " ".join(text.split())  # code has several lines
    return text if len(text) <= _MOST_PROGRAM_CHARACTERS else f"{text[:_MOST_PROGRAM_CHARACTERS]}..."


def _format_state(status: RunStatus) -> str:
    started = status.started[:19].replace("T", " ")
    if status.outcome == "running":
        agent = f"agent {status.agent_process_id}" + (f" on {status.host}" if status.host else "")
        return f"runs since {started} UTC, for {format_seconds(status.seconds or 0.0)}; {agent}"
    if status.outcome == "unknown":
        return f"started {started} UTC; {status.verdict}"
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    after = "" if status.seconds is None else f" after {format_seconds(status.seconds)}"
    return f"started {started} UTC, {status.outcome}{after}{code}: {status.verdict}"


def _format_figures(status: RunStatus) -> str:
    parts = [format_count(status.worker_count, "worker")]
    # Of all hosts, where `servers` has those of this one.
    parts += [format_count(count, role) for role, count in status.process_counts.items() if count]
    if status.steps is not None:
        parts.append(format_count(status.steps, "step"))
    if status.samples_per_second is not None:
        parts.append(f"{_format_number(status.samples_per_second)} samples/s")
    return f"{', '.join(parts)}; logs in {shorten_path(status.log_folder)}"


def _format_workers(status: RunStatus) -> list[str]:
    workers = [worker for worker in status.workers if worker.state != "elsewhere"]
    if not workers:
        return []
    has_servers = any(server.activity is not None for server in status.servers)
    heading = [
        "rank",
        "pid",
        "state",
        "steps",
        "steps/s",
        "CPU",
        "memory",
        *(["ahead"] if has_servers else []),
        "where",
    ]
    rows = [heading]
    for worker in workers:
        row = [
            str(worker.rank),
            _or_unknown(worker.process_id),
            worker.state if worker.exit_code is None else f"{worker.state}, {worker.exit_code}",
            _or_unknown(worker.steps),
            _UNKNOWN if worker.steps_per_second is None else _format_number(worker.steps_per_second),
            _UNKNOWN if worker.cpu_percent is None else f"{worker.cpu_percent:.0f} %",
            _UNKNOWN if worker.memory_bytes is None else format_bytes(worker.memory_bytes),
        ]
        rows.append(
            [*row, *([_format_ahead(worker.rank, status.servers)] if has_servers else []), _format_place(worker)]
        )
    return format_table(rows, right=[0, 1, 3, 4, 5, 6, 7] if has_servers else [0, 1, 3, 4, 5, 6])


def _format_elsewhere(status: RunStatus) -> list[str]:
    lines = []
    for host in dict.fromkeys(worker.host for worker in status.workers if worker.state == "elsewhere"):
        ranks = [worker.rank for worker in status.workers if worker.state == "elsewhere" and worker.host == host]
        text = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} are"
        lines.append(f"  {text} on {host}: `rankless status` there shows more")
    return lines


def _format_place(worker: WorkerReport) -> str:
    pause = ""
    if worker.seconds_since_step is not None and worker.steps_per_second is not None:
        usual = 1 / worker.steps_per_second if worker.steps_per_second else 0.0
        if worker.seconds_since_step > max(2.0, 2 * usual):
            pause = f"; last step {format_seconds(worker.seconds_since_step)} ago"
    if worker.operation and worker.operation not in worker.place:
        return f"{worker.operation} at {worker.place}{pause}"
    return (worker.place or _UNKNOWN) + pause


def _format_ahead(rank: int, servers: Sequence[ServerReport]) -> str:
    """Return by how many transactions a worker is ahead of the server that has committed least of them."""
    ahead = [
        each.activity.transactions_ahead[rank]
        for each in servers
        if each.activity is not None and rank < len(each.activity.transactions_ahead)
    ]
    return str(max(ahead)) if ahead else _UNKNOWN


def _format_processes(processes: Sequence[ServerReport]) -> list[str]:
    if not processes:
        return []
    has_copies = any(process.copy_of is not None for process in processes)
    title, names = _name_processes(processes)
    heading = (title, "pid", "state", "restarts", "CPU", "memory", "steps", "steps/s", "requests/s", "pulled rows/s")
    rows = [[*heading, "pushed rows/s", "bytes/s", *(["copy of"] if has_copies else []), "address"]]
    for process, name in zip(processes, names, strict=True):
        moved = (process.pulled_bytes_per_second, process.pushed_bytes_per_second)
        rates = (
            process.transactions_per_second,
            process.requests_per_second,
            process.pulled_rows_per_second,
            process.pushed_rows_per_second,
        )
        rows.append(
            [
                name,
                str(process.process_id),
                process.state,
                str(process.restarts),
                _UNKNOWN if process.cpu_percent is None else f"{process.cpu_percent:.0f} %",
                _UNKNOWN if process.memory_bytes is None else format_bytes(process.memory_bytes),
                _UNKNOWN if process.activity is None else str(process.activity.transactions),
                *(_UNKNOWN if rate is None else _format_number(rate) for rate in rates),
                _UNKNOWN if None in moved else format_bytes(sum(rate or 0.0 for rate in moved)),
                *(["" if process.copy_of is None else str(process.copy_of)] if has_copies else []),
                process.address,
            ]
        )
    lines = format_table(rows, right=[0, 1, *range(3, 13 if has_copies else 12)])
    return [*lines, *_format_tables(processes), *_format_refused(processes)]


def _name_processes(processes: Sequence[ServerReport]) -> tuple[str, list[str]]:
    """Return a heading and the names below it: processes of one role have it in the heading, as workers have "rank"."""
    roles = list(dict.fromkeys(process.role for process in processes))
    if len(roles) == 1:
        return roles[0], [str(process.index) for process in processes]
    return "process", [f"{process.role} {process.index}" for process in processes]


def _format_tables(processes: Sequence[ServerReport]) -> list[str]:
    holders = [process for process in processes if process.activity is not None and process.activity.tables]
    title, names = _name_processes(holders)
    rows = [["table", title, "rows", "memory", "hottest shards"]]
    for process, name in zip(holders, names, strict=True):
        for table in () if process.activity is None else process.activity.tables:
            hottest = _format_hottest(table)
            rows.append([table.name, name, f"{table.rows:,}", format_bytes(table.memory_bytes), hottest])
    return format_table(rows, right=[1, 2, 3]) if holders else []


def _format_hottest(table: TableActivity) -> str:
    """Return the shards with their shares of the requested ids. On average each of N shards has 1/N."""
    shares = [
        f"{shard.shard}: {100 * shard.requested_ids / table.requested_ids:.2g} %"
        for shard in table.hottest_shards
        if table.requested_ids
    ]
    return f"{', '.join(shares)} of the ids; {100 / table.shards:.2g} % on average" if shares else _UNKNOWN


def _format_refused(processes: Sequence[ServerReport]) -> list[str]:
    return [
        f"  {process.role} {process.index} has refused {sum(process.activity.refused.values()):,} messages: "
        + ", ".join(f"{count:,} of {reason}" for reason, count in process.activity.refused.items())
        for process in processes
        if process.activity is not None and process.activity.refused
    ]


def _format_number(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.5 or number == 0 else f"{number:.3g}"


def _or_unknown(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)
