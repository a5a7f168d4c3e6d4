"""`oneflow.env`: the machines."""

from collections.abc import Mapping
from typing import Any

from .missing import getattr_of, refuse
from .session import current_session

__getattr__ = getattr_of("env")


def machine(*machines: Any) -> None:
    """Train on several machines. Start the same script on each of them.

    Args:
        *machines: A list of `{"addr": address}`, or such dicts. The first machine prints and saves.

    Raises:
        ConfigError: A machine has no address, or a job was called before.
    """
    listed = machines[0] if len(machines) == 1 and isinstance(machines[0], list | tuple) else machines
    for each in listed:
        if not isinstance(each, Mapping) or not isinstance(each.get("addr"), str) or set(each) - {"addr", "id"}:
            raise refuse("flow.env.machine", f"{each!r}", 'pass [{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}]')
    current_session().set_machines([each["addr"] for each in listed])


def ctrl_port(port: int) -> None:
    """Set the port of the first machine, on which the machines meet. One machine needs none. Default: 9988."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise refuse("ctrl_port", f"{port!r}", "pass a port, such as 9988")
    current_session().set_port(port)
