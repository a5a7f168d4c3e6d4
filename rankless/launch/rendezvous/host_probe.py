"""Checks in the background why a host has not joined."""

import threading
import time

from rankless.config.run_config import Cluster
from rankless.launch.rendezvous.connect import HostUnreachableError, open_connection

PROBE_TIMEOUT_SECONDS = 2.0
PROBE_INTERVAL_SECONDS = 4.0
SSH_PORT = 22


class ReachabilityProbe:
    """Probes one host repeatedly in a thread, for as long as somebody reads the result."""

    def __init__(self, cluster: Cluster, host_index: int) -> None:
        self._address = cluster.hosts[host_index].address
        self._result: str | None = None
        self._last_read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"probe of {self._address}", daemon=True)
        self._thread.start()

    def read_result(self) -> str | None:
        """Return the last result as text, or None before the first."""
        self._last_read_at = time.monotonic()
        return self._result

    def _run(self) -> None:
        while time.monotonic() - self._last_read_at < 3 * PROBE_INTERVAL_SECONDS:
            self._result = describe_reachability(self._address)
            time.sleep(PROBE_INTERVAL_SECONDS)


def describe_reachability(address: str, port: int = SSH_PORT, *, timeout_seconds: float = PROBE_TIMEOUT_SECONDS) -> str:
    """Return as text whether a host can be reached.

    The probe connects to the host's ssh port. Every host that is up answers it, unless a firewall drops packets.
    """
    try:
        open_connection(address, port, timeout_seconds=timeout_seconds).close()
    except HostUnreachableError as error:
        if error.code is None:
            return "its name does not resolve here"
        if error.has_timed_out:
            return "no answer: it is down, or a firewall drops packets to it"
        if error.has_no_route:
            return "no route to it: the host or its network is down"
        if not error.was_refused:
            return str(error)
    return "it is up, but the job is not started there or cannot reach this host"
