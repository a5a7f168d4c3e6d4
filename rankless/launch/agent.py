"""The agent: starts a run's workers on this host, watches them, ends them together, and says how it went."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from rankless.errors import LaunchError
from rankless.launch.interrupts import Interrupts
from rankless.launch.judge import signal_name
from rankless.launch.logs import make_run_folder, shown_streams
from rankless.launch.notices import failure, start_table
from rankless.launch.parent_process import ParentProcess
from rankless.launch.ports import open_store_socket, require_own_address, reserve_master_port
from rankless.launch.shared_files import SharedFiles
from rankless.launch.terminal import Terminal
from rankless.launch.watch import Outcome, Watch
from rankless.launch.workers import plan_workers
from rankless.plan.run_plan import RunPlan
from rankless.records.events import AnyRecord, FileOpened, Said


def run(
    plan: RunPlan,
    *,
    on_record: Callable[[AnyRecord], None],
    out: TextIO,
    err: TextIO,
    making_room: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run a job to its end and return its exit code: 0, the culprit's, or 128 + the signal that ended it.

    Rank 0's output (every rank's with `show="all"`) goes to `out`, what the agent has to say to `err`, a foreign
    program's two streams to both, every record to `on_record`. `making_room` is entered around each writing, for an
    observer that draws on the same terminal. Nothing that the job started is alive afterwards.
    """
    require_own_address(plan.hosts.master_address)
    signals = plan.foreign.signals if plan.foreign is not None else ()
    port = plan.hosts.master_port
    with open_store_socket() as store, reserve_master_port(port) as reserved, Interrupts(signals) as interrupts:
        folder = make_run_folder(plan)
        workers = plan_workers(plan, folder=folder, store=store, reserved=reserved)
        log_files = [os.path.relpath(worker.plan.log_file) for worker in workers]
        _tell(err, start_table(plan, folder=folder, log_files=log_files))
        streams = shown_streams(plan, folder, [worker.plan for worker in workers])
        terminal = Terminal(streams, out=out, err=err, making_room=making_room)
        parent_log = os.path.join(folder, "parent.log")
        parent = ParentProcess(plan, workers, store=store, log_path=parent_log)
        store.close()  # rank 0 alone listens: when it is gone, ranks that still come are refused at once
        said: set[str] = set()
        files = SharedFiles(foreign=plan.foreign is not None)

        def take(record: AnyRecord) -> None:
            text = files.notice(record) if isinstance(record, FileOpened) else None
            if isinstance(record, Said):
                text = record.text
            if text is not None and text not in said:
                said.add(text)
                with making_room():
                    _tell(err, f"rankless: {text}\n")
            on_record(record)

        try:
            watch = Watch(parent, interrupts=interrupts, on_record=take, on_turn=terminal.pump, foreign=plan.foreign)
            outcome = watch.run_to_end()
        finally:
            parent.close(patience_seconds=1.0)
            terminal.close()
    with making_room():
        last_words = [os.path.relpath(worker.plan.error_log_file or worker.plan.log_file) for worker in workers]
        return _conclude(outcome, log_files=last_words, parent_log=parent_log, err=err)


def _conclude(outcome: Outcome, *, log_files: Sequence[str], parent_log: str, err: TextIO) -> int:
    with open(parent_log, encoding="utf-8", errors="replace") as log:
        last_words = log.read()[-2000:].strip()
    if not last_words:
        os.unlink(parent_log)
    if outcome.interrupted_by is not None:
        _tell(err, f"rankless: ended by {signal_name(outcome.interrupted_by)}\n")
        return 128 + outcome.interrupted_by
    if outcome.verdict is not None:
        _tell(err, failure(outcome.verdict, log_file=log_files[outcome.verdict.culprit]))
        return outcome.verdict.exit_code
    if outcome.parent_exit_code != 0:
        raise LaunchError(
            expected="the process that starts the workers to see them to their end",
            found=f"it ended with {outcome.parent_exit_code} first" + (f":\n{last_words}" if last_words else ""),
            fix="try plain processes: --no-warm, or torchrun's --start-method spawn; if a signal ended it (negative), "
            "find out who sent it",
        )
    return 0


def _tell(err: TextIO, text: str) -> None:
    try:
        err.write(text)
        err.flush()
    except OSError:  # a terminal that is gone never stops training
        return
