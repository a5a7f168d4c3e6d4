"""The tables that fleetrun shows at the start: its arguments, and the first process's environment."""

import itertools
import os
from collections.abc import Mapping, Sequence

from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import AgreedProcesses, RunConfig
from rankless.launch.supervisor.start_and_end_text import format_processes
from rankless.records.number_formatting import format_count

LOG_NAME = "workerlog.{}"
"""Paddle's name for the log file of a rank. Its users look for it directly in the log folder."""
SERVER_LOG_NAME = "serverlog.{}"
"""Paddle's name for the log file of a parameter server."""
HETEROGENEOUS_LOG_NAME = "heterlog.{}"
"""Paddle's name for the log file of a heterogeneous worker."""
SHOWN = (
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINERS_NUM",
    "FLAGS_selected_gpus",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_TRAINER_ID",
)
SHOWN_WITH_SERVERS = ("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST")
"""What the table has besides in a run with parameter servers."""
HETEROGENEOUS_ENDPOINTS = "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"
_LISTS = ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST", HETEROGENEOUS_ENDPOINTS)
MOST_LINES = 8
"""The most lines for one variable's value."""
_TITLE = " Configuration Arguments "
_WIDTH = 48


def format_arguments_table(arguments: Mapping[str, object]) -> str:
    """Return a table with each argument and its value."""
    lines = [f"{name}: {value}" for name, value in arguments.items()]
    return "\n".join([_TITLE.center(_WIDTH, "-"), *lines, "-" * _WIDTH]) + "\n"


def format_environment_table(environment: Mapping[str, str | None], *, local_count: int) -> str:
    """Return a box with Paddle's variables of one worker."""
    rows = [("Distributed Envs", "Value")]
    shown = [*SHOWN, *(SHOWN_WITH_SERVERS if SHOWN_WITH_SERVERS[1] in environment else ())]
    for name in (*shown, *([HETEROGENEOUS_ENDPOINTS] if HETEROGENEOUS_ENDPOINTS in environment else ())):
        value = environment.get(name)
        items = [value] if value is not None else ["(not set: on the CPU)"]
        if name in _LISTS:
            items = items[0].split(",")
        if len(items) > MOST_LINES:
            items = [*items[: MOST_LINES - 1], f"... {len(items)} in all"]
        rows += [("" if number else name, item) for number, item in enumerate(items)]
    left, right = (max(len(row[column]) for row in rows) + 4 for column in range(2))
    head, *body = [f"    |{name.center(left)}{value.center(right)}|" for name, value in rows]
    thick, thin = (f"    +{mark * (left + right)}+" for mark in "=-")
    count = "1 process" if local_count == 1 else f"{local_count} processes"
    title = f"Local start {count}. First process distributed environment info:"
    return "\n".join([title, thick, head, thin, *body, thick]) + "\n"


def format_server_lines(config: RunConfig, servers: AgreedProcesses, host_index: int, folder: str) -> str:
    """Return lines about the parameter servers of all hosts, and about the log files of those of this host."""
    count, own = len(servers.addresses), servers.on_host(host_index)
    shown = [name_endpoint(address) for address in servers.addresses[:MOST_LINES]]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    lines = [f"rankless: {format_count(count, 'server')} on the CPU at {', '.join(shown)}{more}"]
    if own:
        logs = os.path.join(config.request.log_folder, SERVER_LOG_NAME.format(own[0]))
        rest = [SERVER_LOG_NAME.format(index) for index in own[1:]]
        if rest:
            logs += f" to {rest[-1]}" if own[-1] - own[0] == len(rest) else f", {', '.join(rest)}"
        here = "" if len(own) == count else f"{format_processes((servers.role, index) for index in own)} here"
        lines[0] += f"{here}; logs: {logs} (in {folder}, where they stay)"
    return "\n".join(lines) + "\n"


def name_endpoint(address: str) -> str:
    """Return HOST:PORT of a server's address `tcp://HOST:PORT`."""
    return address.removeprefix("tcp://")


def _format_logs(folder: str, names: Sequence[str]) -> str:
    """Return the first of the log files of the workers of a kind and, if there are more, the last one."""
    path = os.path.join(folder, names[0])
    return path if len(names) == 1 else f"{path} to {names[-1]}"


def format_worker_line(
    config: RunConfig, lead: WorkerConfig, logs: Sequence[str], *, folder: str, first_host: str
) -> str:
    """Return a line about this host's workers and log files, and on other hosts than host 0 one that names host 0.

    `lead` is this host's first worker. `logs` are the names of the log files of this host's workers, by their ranks.
    """
    count = config.worker_count
    devices = list(dict.fromkeys(config.devices))
    where = "the CPU" if devices == ["cpu"] else ", ".join(devices)
    shared = (
        "" if devices == ["cpu"] or count <= len(devices) else ", which they share: they talk through Gloo, not NCCL"
    )
    kinds = [list(names) for _, names in itertools.groupby(logs, key=lambda name: name.partition(".")[0])]
    files = ", ".join(_format_logs(config.request.log_folder, names) for names in kinds)
    lines = [
        f"rankless: on {where}{shared}; {format_count(config.threads_per_worker, 'thread')} each; "
        f"logs: {files} (in {folder}, where they stay)"
    ]
    if lead.host > 0:
        lines.append(f"rankless: host {lead.host + 1} of {lead.host_count}; {first_host} shows the training")
    return "\n".join(lines) + "\n"
