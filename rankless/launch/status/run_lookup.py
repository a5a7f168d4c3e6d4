"""Finds runs: those of this user in progress on this host, and the one that a user names.

Each agent has the record of its run open. A name is the id of a run, its log folder, a link to that, or its `run.json`.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.errors import ConfigError
from rankless.launch.status.build_status import report_ended
from rankless.launch.status.read_counters import open_shared_file_of
from rankless.records.live_run import LAYOUT, LIVE_RUN_NAME, LiveRun, current_system, is_agent_alive
from rankless.records.run_json_format import AgentProcess, RunProgram, RunSummary, decode_run_summary
from rankless.records.run_status import RunStatus
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


_SUMMARY_NAME = re.compile(r"run\d*\.json")
"""`run.json` of host 0, `run1.json` of the next host."""


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run of which there is a summary, and no agent on this host."""

    program: RunProgram
    status: RunStatus


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """What a name stands for: one run, of which several hosts may be this one, or none in progress."""

    running: Sequence[LiveRun] = ()
    ended: EndedRun | None = None


def find_named_run(name: str, *, log_folder: str) -> FoundRuns:
    """Return the run with a name.

    Args:
        name: Its id, its log folder, a link to that, or its `run.json`.
        log_folder: The folder of the log folders, for the id of a run that has ended.

    Raises:
        ConfigError: There is no such run.
    """
    folder = _find_folder(name, log_folder)
    if folder is not None:
        found = _find_in(folder)
        if found is not None:
            return found
    running = find_running_runs()
    matches = [run for run in running if name == run.run_id or Path(run.log_folder).resolve() == folder]
    if matches:
        return FoundRuns(running=matches)
    ids = ", ".join(dict.fromkeys(run.run_id for run in running))
    raise ConfigError(
        expected="RUN: the id of a run, its log folder, or its run.json",
        found=f"{name!r}, which is none of these" if folder is None else f"{name}, a folder without a run.json",
        fix=f"name one that runs: {ids}" if ids else f"no run is in progress; name one of the folders in {log_folder}",
    )


def _find_folder(name: str, log_folder: str) -> Path | None:
    """Return the existing folder that a name may stand for."""
    if not name or "\0" in name:
        return None
    path = Path(name)
    try:
        is_summary = _SUMMARY_NAME.fullmatch(path.name) is not None and path.is_file()
        candidates = [path.parent if is_summary else path]
        if os.sep not in name:
            candidates.append(Path(log_folder) / name)
        return next((each.resolve() for each in candidates if each.is_dir()), None)
    except OSError:  # a name that is too long, or a link that leads to itself
        return None


def _find_in(folder: Path) -> FoundRuns | None:
    """Return the run whose summary is in a folder; None if there is no summary."""
    found = _find_running_in(folder)
    if found.running or found.ended is None or found.ended.status.outcome not in ("killed", "unknown"):
        return found if found.running or found.ended is not None else None
    return _find_running_in(folder)  # between two looks the run may have ended


def _find_running_in(folder: Path) -> FoundRuns:
    paths = sorted(path for path in folder.glob("run*.json") if _SUMMARY_NAME.fullmatch(path.name))
    summaries = [(path, _read_summary(path)) for path in paths]
    system = current_system()
    running = []
    for _, (_, summary) in summaries:
        agent = summary.agent
        if agent is not None and summary.outcome == "running" and agent.system == system:
            run = read_run_of_agent(agent)
            if run is not None and run.log_folder == summary.log_folder:  # an agent may make several runs
                running.append(run)
    if running or not summaries:
        return FoundRuns(running=running)
    _, (program, summary) = summaries[0]
    return FoundRuns(ended=EndedRun(program=program, status=_report(summary, system)))


def _read_summary(path: Path) -> tuple[RunProgram, RunSummary]:
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data, type=RunProgram), decode_run_summary(data)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            expected=f"the summary of a run in {path}", found=str(error), fix="name the log folder of another run"
        ) from None


def _report(summary: RunSummary, system: str) -> RunStatus:
    if summary.outcome != "running":
        return report_ended(summary, outcome=summary.outcome, verdict=summary.verdict)
    agent = summary.agent
    if agent is None:
        verdict = "it ran when an earlier version of Rankless wrote run.json, which does not name its agent"
        return report_ended(summary, outcome="unknown", verdict=verdict)
    if agent.system != system:
        verdict = f"its agent was process {agent.process_id} of the host {agent.host}: call rankless status there"
        return report_ended(summary, outcome="unknown", verdict=verdict)
    if is_agent_alive(agent):
        verdict = f"its agent, process {agent.process_id}, is alive, but shows nothing to this user and this version"
        return report_ended(summary, outcome="unknown", verdict=verdict)
    verdict = f"its agent, process {agent.process_id}, is gone and has left no verdict"
    return report_ended(summary, outcome="killed", verdict=verdict)
