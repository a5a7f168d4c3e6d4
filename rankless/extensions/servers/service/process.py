"""The program of a server: `python -m rankless.extensions.servers.service.process`, configured by `RANKLESS_SERVER`."""

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import zmq

from rankless.errors import RanklessError, TableError
from rankless.extensions.servers.config import CANNOT_CONTINUE, SERVER_ROLE, ServerConfig, read_server_config
from rankless.extensions.servers.service.server_status import ServerStatusPage
from rankless.extensions.servers.service.table_server import TableServer, log_line
from rankless.extensions.servers.service.wire.encryption import FailedHandshakes, encrypted_server
from rankless.extensions.servers.service.wire.server_socket import ServerSocket, bound
from rankless.extensions.servers.service.wire.setting_formats import decode_table_settings
from rankless.extensions.servers.tables.durable_tables import DurableTables
from rankless.terminal import process_title

_MOST_MESSAGES = 64
"""Messages before it looks for a signal again."""
_MOST_LAST_MESSAGES = 4096


def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM, or until the parent process ends.

    Raises:
        ServerError: The address cannot be used.
        TableError: The memory that outlives this process is damaged, or cannot be mapped.
    """
    log = functools.partial(log_line, config.index)
    parent = os.getppid()
    with contextlib.ExitStack() as resources:
        wakeup, _ = signal_sockets = socket.socketpair()
        for end in signal_sockets:
            end.setblocking(False)
            resources.enter_context(end)
        signal.set_wakeup_fd(signal_sockets[1].fileno(), warn_on_full_buffer=False)
        resources.callback(signal.set_wakeup_fd, -1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the launcher decides
        signal.signal(signal.SIGTERM, lambda *_: None)  # the wakeup socket tells the loop
        context = resources.enter_context(zmq.Context())
        router = resources.enter_context(context.socket(zmq.ROUTER))
        messages = ServerSocket(router)
        failed_handshakes = FailedHandshakes()
        if config.encrypted:
            failed_handshakes = resources.enter_context(encrypted_server(context, router, config.token))
        address = resources.enter_context(bound(router, config.address))
        durable = _map_tables(config, log)
        server = TableServer(config, messages.send, log, durable)
        log(f"serves at {address}, process {os.getpid()}, for {config.worker_count} workers")
        _report_ready(config, address)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wakeup, zmq.POLLIN)
        failed_handshakes.register(poller)
        status = ServerStatusPage(config.status_descriptor, server.requests, server.counter, server.refused)
        while os.getppid() == parent:
            events = dict(poller.poll(status.poll_milliseconds))
            if wakeup.fileno() in events and signal.SIGTERM in wakeup.recv(4096):
                break
            failed_handshakes.add_to(server.refused)
            for _ in range(_MOST_MESSAGES):
                if not messages.receive(server.take):
                    break
            status.publish(is_idle=not events)
        else:
            log(f"the parent process {parent} has ended")
        for _ in range(_MOST_LAST_MESSAGES):  # what had arrived
            if not messages.receive(server.take):
                break
        server.end()
        _log_statistics(server, config.index)


def _map_tables(config: ServerConfig, log: Callable[[str], None]) -> DurableTables | None:
    if config.memory_descriptor is None:
        return None
    start = time.perf_counter()
    durable = DurableTables(config.memory_descriptor, decode_table_settings)
    if durable.tables or config.incarnation:
        log(
            f"continues after transaction {durable.committed} with {len(durable.tables)} tables of an earlier process, "
            f"mapped in {(time.perf_counter() - start) * 1e3:.1f} ms"
        )
    return durable


def _report_ready(config: ServerConfig, address: str) -> None:
    if config.ready_descriptor is not None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(config.ready_descriptor, "w") as pipe:
            pipe.write(f"ready {address}\n" if config.memory_descriptor is None else f"ready {address} durable\n")


def _log_statistics(server: TableServer, index: int) -> None:
    for opened in server.requests.tables.tables:
        log_line(index, f"table {opened.name!r} after {opened.table.step} steps: {opened.table.statistics()}")
    log_line(index, f"ends; refused: {dict(server.refused)}")


def main() -> int:
    """Serve with the configuration of the environment. Return the exit code."""
    try:
        config = read_server_config()
        count = config.server_count * (1 + config.replicas)
        process_title.show_role_process("parameter server", config.index, count, short=SERVER_ROLE)
        serve(config)
    except RanklessError as error:
        print(f"a parameter server cannot run: {error}", file=sys.stderr)
        return CANNOT_CONTINUE if isinstance(error, TableError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
