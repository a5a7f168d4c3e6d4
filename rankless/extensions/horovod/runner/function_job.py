"""Runs a function as a job of `rankless horovodrun`: serves it to every process, and collects the results.

Note [transport of the function]: the processes may be on other hosts without a shared disk. So they connect to a port
of this process and authenticate with a key (the HMAC challenge of multiprocessing). They receive the key in their
environment, never on a command line. Only data from processes with the key is unpickled.
"""

import contextlib
import secrets
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import msgspec

from rankless.config import environment
from rankless.extensions.horovod.runner.run_task import FUNCTION_KEY
from rankless.extensions.horovodrun.hosts import fill_hosts, make_cluster
from rankless.extensions.horovodrun.parser import HorovodrunFlags
from rankless.runtime.subprocess_command import rankless_command

KEY_BYTES = 32
TASK_MODULE = "rankless.extensions.horovod.runner.run_task"
_OPTION_NAMES = {
    "blacklist_cooldown_range": "--blacklist-cooldown-range",
    "network_interfaces": "--network-interfaces",
    "mpi_args": "--mpi-args",
}


class FunctionServer:
    """Sends the function to processes that have the key, and stores their results."""

    def __init__(self, payload: bytes, *, address: str) -> None:
        self._payload = payload
        self._key = secrets.token_bytes(KEY_BYTES)
        self._listener = Listener((address, 0), family="AF_INET6" if ":" in address else "AF_INET", backlog=128)
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, str]] = []
        """Rank and traceback, in order of arrival."""
        threading.Thread(target=self._accept, name="horovod.run", daemon=True).start()

    @property
    def key(self) -> bytes:
        """The key with which a process authenticates."""
        return self._key

    @property
    def address(self) -> tuple[str, int]:
        """The host address and the port."""
        address = self._listener.address
        assert isinstance(address, tuple)
        return str(address[0]), int(address[1])

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="horovod.run", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # A process that is gone or has no key is ignored here. The end of the job shows the reason.
        with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            connection.send_bytes(self._payload)
            kind, rank, value = cloudpickle.loads(connection.recv_bytes())
            if kind == "result":
                self.results[rank] = value
            else:
                self.errors.append((rank, value))
            connection.send_bytes(b"taken")


def run_function(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    flags: HorovodrunFlags,
    *,
    executable: str | None,
) -> list[Any]:
    """Return the function's results by rank. Raises RuntimeError if a process failed."""
    assert flags.num_proc is not None
    # The path is pickled separately: unpickling the function imports its modules from there.
    payload = cloudpickle.dumps((list(sys.path), cloudpickle.dumps((func, args, kwargs))))
    cluster = make_cluster(flags, fill_hosts(flags, flags.num_proc))
    with contextlib.closing(
        FunctionServer(payload, address="127.0.0.1" if cluster is None else cluster.hosts[0].address)
    ) as server:
        host, port = server.address
        program = [executable or sys.executable, "-m", TASK_MODULE, host, str(port)]
        command = rankless_command("horovodrun", *format_options(flags), *program)
        completed = subprocess.run(
            command, env={**environment.snapshot(), FUNCTION_KEY: server.key.hex()}, stdin=subprocess.DEVNULL
        )
    if completed.returncode or len(server.results) < flags.num_proc:
        raise RuntimeError(_describe_failure(server, completed.returncode))
    return [server.results[rank] for rank in sorted(server.results)]


def format_options(flags: HorovodrunFlags) -> Iterator[str]:
    """Yield the command line arguments for the flags."""
    for name, value in msgspec.structs.asdict(flags).items():
        option = _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            yield option
        elif name == "network_interfaces" and value:
            yield f"{option}={','.join(value)}"
        elif isinstance(value, tuple):
            yield from [option, *map(str, value)] if value else []
        elif value is not None and value is not False:
            yield f"{option}={value}"


def _describe_failure(server: FunctionServer, code: int) -> str:
    if not server.errors:
        return f"horovod.run: the job ended with exit code {code} without all results; what it printed says why"
    rank, trace = server.errors[0]
    return (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: {rank}\nExit code: {code}\n{trace}"
    )


_SAME_NAMES = (
    *("reset_limit", "hosts", "hostfile", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename"),
    "mpi_args",
)


def make_flags(keywords: Mapping[str, Any]) -> HorovodrunFlags:
    """Return the flags for the keywords. Raises ValueError for two that exclude each other."""
    if keywords["hosts"] is not None and keywords["hostfile"] is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if keywords["use_gloo"] and keywords["use_mpi"]:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    cooldown, interfaces = keywords["cooldown_range"], keywords["network_interface"]
    return HorovodrunFlags(
        num_proc=_resolve_renamed(keywords, "num_proc", "np", default=1),
        min_num_proc=_resolve_renamed(keywords, "min_num_proc", "min_np"),
        max_num_proc=_resolve_renamed(keywords, "max_num_proc", "max_np"),
        slots_per_host=keywords["slots"],
        blacklist_cooldown_range=None if cooldown is None else tuple(cooldown),
        disable_cache=bool(keywords["disable_cache"]),
        verbose=bool(keywords["verbose"]),
        gloo=bool(keywords["use_gloo"]),
        mpi=bool(keywords["use_mpi"]),
        network_interfaces=tuple(interfaces.split(",")) if interfaces else (),
        **{name: keywords[name] for name in _SAME_NAMES},
    )


def _resolve_renamed(keywords: Mapping[str, Any], name: str, old: str, *, default: int | None = None) -> int | None:
    """Return the value of a keyword, or of its old name if the new one is not used."""
    value: int | None = keywords[name]
    if keywords[old] is None:
        return value
    warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=4)
    return int(keywords[old]) if value == default else value
