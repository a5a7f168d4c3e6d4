"""Finds the runs of this user that are in progress on this host: by the record that each agent has open."""

import os
from contextlib import suppress

import msgspec

from rankless.launch.status.readings import open_shared_file_of
from rankless.records.live_run import LAYOUT, LIVE_RUN_NAME, LiveRun, is_agent_alive
from rankless.records.run_summary import AgentProcess
from rankless.records.shared_record import read_record


class _RunLayout(msgspec.Struct, frozen=True):
    """The field that all layouts of the record have."""

    layout: int


def find_running_runs() -> list[LiveRun]:
    """Return the runs whose agents are processes of this user, those that began first first."""
    found = []
    for process_id in _list_own_processes():
        with suppress(OSError):  # the process has ended
            for descriptor in os.listdir(f"/proc/{process_id}/fd"):
                run = read_live_run(process_id, int(descriptor))
                if run is not None:
                    found.append(run)
                    break  # the mapping of the record has a descriptor of its own
    return sorted(found, key=lambda run: (run.started_monotonic, run.host))


def read_run_of_agent(agent: AgentProcess) -> LiveRun | None:
    """Return the run of an agent of this system that `run.json` names; None if it is not running any more."""
    run = read_live_run(agent.process_id, agent.descriptor)
    return run if is_agent_alive(agent) else None


def read_live_run(process_id: int, descriptor: int) -> LiveRun | None:
    """Return the run whose record a process has at a descriptor; None if there is none that this version can read."""
    page = open_shared_file_of(process_id, descriptor, LIVE_RUN_NAME)
    if page is None:
        return None
    try:
        record = read_record(page)
    finally:
        os.close(page)
    if record is None:
        return None
    try:
        if msgspec.json.decode(record.data, type=_RunLayout).layout != LAYOUT:
            return None
        run = msgspec.json.decode(record.data, type=LiveRun)
    except msgspec.DecodeError:
        return None
    # A process that the agent has forked has the file too, and one in another namespace has another id there.
    return run if run.process_id == process_id else None


def _list_own_processes() -> list[int]:
    own, found = os.geteuid(), []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:
                    found.append(int(name))
    return found
