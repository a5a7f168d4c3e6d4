"""Which process an id means: ids are used again, and differ between hosts and containers."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from rankless.records.run_summary import AgentProcess


def identify_agent(descriptor: int) -> AgentProcess:
    """Return what identifies this process as the agent whose record is at `descriptor`. Linux only."""
    process_id = os.getpid()
    return AgentProcess(
        process_id=process_id,
        start_ticks=read_start_ticks(process_id) or 0,
        host=platform.node(),
        system=current_system(),
        descriptor=descriptor,
    )


def is_agent_alive(agent: AgentProcess) -> bool:
    """Return whether an agent of this system is alive, and no later process has its id."""
    return read_start_ticks(agent.process_id) == agent.start_ticks


def read_start_ticks(process_id: int) -> int | None:
    """Return the clock ticks from the start of the host to that of a process; None if it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def current_system() -> str:
    """Return what names the present start of this host and this namespace of process ids; "" outside Linux."""
    if sys.platform != "linux":
        return ""
    parts = ["", ""]
    with suppress(OSError):
        parts[0] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        parts[1] = os.readlink("/proc/self/ns/pid")
    return " ".join(parts)
