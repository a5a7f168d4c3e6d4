"""How a run went, for the user: the table at its start, and at its end who failed, on which host, and where to look."""

import os
from collections.abc import Callable
from contextlib import suppress

from rankless.config.run_config import RunConfig
from rankless.config.worker_config import WorkerLaunch
from rankless.errors import LaunchError
from rankless.launch.job_setup import Assembled
from rankless.launch.log_files import run_folder
from rankless.launch.profile import LogFiles, load_profile
from rankless.launch.rendezvous.peers import FollowerPeers, LeaderPeer
from rankless.launch.supervisor.failure_attribution import Verdict, name_signal
from rankless.launch.supervisor.supervisor import RunOutcome
from rankless.launch.supervisor.terminal_text import (
    format_count,
    format_failure,
    format_hosts_table,
    format_start_table,
)


class Account:
    """What is known of a run that the user may want to know."""

    def __init__(self, config: RunConfig, job: Assembled, folder: str) -> None:
        self.config = config
        self.job = job
        self._profile = load_profile(config.launcher)
        self._folder = folder
        self.parent_log = os.path.join(folder, "parent.log" if job.host_index == 0 else f"parent{job.host_index}.log")

    def opening(self, lead: WorkerLaunch) -> str:
        """The table of all workers; on other hosts than host 0 one line; under fleetrun what it shows of its first."""
        config, job = self.config, self.job
        count = len(job.start.workers)
        text = self._profile.opening_text(config, lead, self._folder, job.names[0])
        if text is not None:
            return text
        if job.host_index > 0:
            first, own = job.start.first_rank(job.host_index), job.start.workers[job.host_index]
            ranks = f"rank {first}" if own == 1 else f"ranks {first} to {first + own - 1}"
            return (
                f"rankless: host {job.host_index + 1} of {count}, {ranks}, logs in {self._folder}; "
                f"{job.names[0]} shows the training\n"
            )
        paths = [self.log_file(rank) for rank in range(job.start.world_size)]
        if count == 1:
            has_error_files = self._log_files(0).error is not None
            return format_start_table(config, folder=self._folder, log_files=paths, has_error_files=has_error_files)
        rows = [(job.names[host], device) for host, devices in enumerate(job.devices) for device in devices]
        return format_hosts_table(config, folder=self._folder, rows=rows, log_files=paths)

    def host_name(self, rank: int) -> str:
        """On which host a rank runs; empty where there is only one."""
        return "" if len(self.job.start.workers) == 1 else self.job.names[self.job.start.host_of(rank)]

    def log_file(self, rank: int) -> str:
        """Where a worker's last words are."""
        files = self._log_files(rank)
        return os.path.relpath(files.error or files.output)

    def failure(self, verdict: Verdict) -> str:
        """Who failed, in at most 15 lines; under horovodrun its own sentence after them."""
        host = self.job.start.host_of(verdict.root_cause_rank)
        text = format_failure(
            verdict,
            log_file=self.log_file(verdict.root_cause_rank),
            host=self.host_name(verdict.root_cause_rank),
            report=self.report_file(host) if host > 0 else "",
        )
        has_ended_itself = verdict.cause not in ("host", "interrupted", "hang")
        if has_ended_itself:
            text += self._profile.failure_note(verdict.root_cause_rank, verdict.exit_code)
        return text

    def report_file(self, host: int) -> str:
        """Where another host than host 0 keeps what is said at the end: started by ssh, it has no terminal."""
        return os.path.relpath(os.path.join(run_folder(self.config, self.job.start.run_id, host), f"report{host}.txt"))

    def keep(self, text: str) -> None:
        """Write what is said at the end on this host, which is not host 0, to its file."""
        with suppress(OSError), open(self.report_file(self.job.host_index), "w", encoding="utf-8") as file:
            file.write(text)

    def _log_files(self, rank: int) -> LogFiles:
        start = self.job.start
        host = start.host_of(rank)
        folder = run_folder(self.config, start.run_id, host)
        return self._profile.log_files(folder, rank, rank - start.first_rank(host))

    def parents_last_words(self) -> str:
        """What the workers' parent has written; the file goes if that is nothing."""
        with open(self.parent_log, encoding="utf-8", errors="replace") as log:
            words = log.read()[-2000:].strip()
        if not words:
            with suppress(OSError):
                os.unlink(self.parent_log)
        return words


def conclude(outcome: RunOutcome, account: Account, *, tell_text: Callable[[str], None]) -> int:
    """The exit code of the run, once the user and the other hosts are told how it ended."""
    peers = account.job.peers
    if isinstance(peers, LeaderPeer):
        return _conclude_led(outcome, account, peers, tell_text=tell_text)
    words = account.parents_last_words()
    code, text = _verdict_on(outcome, account)
    failed_alone = code == 0 and outcome.fork_server_exit_code not in (0, None)
    if isinstance(peers, FollowerPeers) and failed_alone:
        peers.send_job_end(2, ["rankless: host 0 could not see its workers to their end\n"] * len(account.job.names))
    elif isinstance(peers, FollowerPeers):
        peers.send_job_end(code, [_text_for(host, outcome, account, text) for host in range(len(account.job.names))])
    tell_text(text)
    if failed_alone:
        raise LaunchError(
            expected="the process that starts the workers to see them to their end",
            found=f"it ended with {outcome.fork_server_exit_code} first" + (f":\n{words}" if words else ""),
            fix="try plain processes: --no-warm, or torchrun's --start-method spawn; if a signal ended it (negative), "
            "find out who sent it",
        )
    return code


def _verdict_on(outcome: RunOutcome, account: Account) -> tuple[int, str]:
    if outcome.interrupted_by is not None:
        return 128 + outcome.interrupted_by, f"rankless: ended by {name_signal(outcome.interrupted_by)}\n"
    if outcome.verdict is not None:
        return outcome.verdict.exit_code, account.failure(outcome.verdict)
    return 0, ""


def _text_for(host: int, outcome: RunOutcome, account: Account, text: str) -> str:
    """What another host shows: the whole of it where the culprit was, else a line."""
    verdict = outcome.verdict
    if not text or outcome.interrupted_by is not None or verdict is None:
        return text.replace("ended by", f"{account.job.names[0]} was told to end by") if text else ""
    if account.job.start.host_of(verdict.root_cause_rank) == host:
        return text
    return f"rankless: the job was ended: {text.splitlines()[0].removeprefix('rankless: ')}\n"


def _conclude_led(
    outcome: RunOutcome, account: Account, leading: LeaderPeer, *, tell_text: Callable[[str], None]
) -> int:
    code, text = _verdict_led(outcome, account, leading)
    if text:
        account.keep(text)
        tell_text(text)
    return code


def _verdict_led(outcome: RunOutcome, account: Account, leading: LeaderPeer) -> tuple[int, str]:
    words = account.parents_last_words()
    if leading.job_end is not None:
        return leading.job_end.exit_code, leading.job_end.text
    if outcome.interrupted_by is not None:
        return 128 + outcome.interrupted_by, f"rankless: ended by {name_signal(outcome.interrupted_by)}\n"
    text = f"rankless: the process that starts the workers wrote: {words}\n" if words else ""
    ended = format_count(account.job.start.workers[account.job.host_index], "worker")
    return 1, f"{text}rankless: host 0, {account.job.names[0]}, was lost: {leading.lost_reason}; {ended} here ended\n"
