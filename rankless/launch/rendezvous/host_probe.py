"""What can be seen from here of a host that does not come: asked in the background, told beside its name."""

import threading
import time

from rankless.config.run_config import Cluster
from rankless.launch.rendezvous.connect import HostUnreachableError, connected

PROBE_SECONDS = 2.0
AGAIN_SECONDS = 4.0
SSH_PORT = 22


class Probe:
    """Looks at one host again and again, in a thread of its own, while somebody asks."""

    def __init__(self, cluster: Cluster, place: int) -> None:
        self._address = cluster.hosts[place].address
        self._found: str | None = None
        self._asked = time.monotonic()
        self._thread = threading.Thread(target=self._look, name=f"probe of {self._address}", daemon=True)
        self._thread.start()

    def found(self) -> str | None:
        """What was seen last, in words; None while nothing was."""
        self._asked = time.monotonic()
        return self._found

    def _look(self) -> None:
        while time.monotonic() - self._asked < 3 * AGAIN_SECONDS:
            self._found = describe_reachability(self._address)
            time.sleep(AGAIN_SECONDS)


def describe_reachability(address: str, port: int = SSH_PORT, *, timeout_seconds: float = PROBE_SECONDS) -> str:
    """Whether a host can be reached, in words: tried with a connection to the port of its ssh, which any host answers
    that is up and has no firewall that drops.
    """
    try:
        connected(address, port, timeout_seconds=timeout_seconds).close()
    except HostUnreachableError as unreached:
        if unreached.code is None:
            return "its name does not resolve here"
        if unreached.was_dropped:
            return "no answer: it is down, or a firewall drops packets to it"
        if unreached.has_no_way:
            return "no way leads to it: its network or it is down"
        if not unreached.was_refused:
            return str(unreached)
    return "it is up, the job is not started there or cannot reach this host"
