"""The workers' parent: imports torch once, forks the workers, and guards them.

Note [one thread, no computing]: a forked child has only the thread that forked. Had the parent computed
anything with torch, its children would wait for ever for worker threads that exist in the parent alone. So
the parent imports, and does nothing else.

Note [guard]: the parent is in a session of its own, adopts orphaned descendants, and reads a lifeline from
the agent. At its end of file (the agent is gone, however it went) everything below is stopped, then killed.
Workers get the parent-death signal KILL for the case that the parent itself is killed; the parent gets
CONT, so that it cannot sleep through the agent's death.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from rankless.config.run_config import Program
from rankless.config.script_source import names_rankless, names_word
from rankless.config.worker_config import HostConfig, WorkerLaunch
from rankless.records.channel import send_record
from rankless.records.events import Exited, Notice, Started
from rankless.runtime.connections import cut_connections
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.hooks.import_aliases import ALIASES, is_alias_active
from rankless.runtime.process_tree import (
    adopt_orphans,
    end_descendants,
    send_signal,
    set_parent_death_signal,
    thread_count,
)
from rankless.runtime.python_command import python_command
from rankless.runtime.spawn_protocol import CUT, KILL, decode_signals, receive_worker_launch
from rankless.runtime.worker import WorkerProcess, enter_forked

TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "rankless.runtime.hooks.torch_settings",
    "rankless.runtime.hooks.numpy_settings",
    "rankless.runtime.hooks.sampler_epochs",
)
JOB_MODULES = (
    "torch._functorch.aot_autograd",
    "torch.fx",
    "rankless.api",
    "rankless.jobs.job",
    "rankless.data.loader",
)
"""What the first job call needs besides; imported only for programs that use Rankless."""

Cores = set[int] | None


def main(fast_exit: FastExit) -> Callable[[], None] | None:
    """Serve until no worker is left; in a forked worker, return at once with what the worker is to run."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=HostConfig)
    cores = withdraw()
    warm = config.warm and import_torch(with_jobs=names_rankless(config.program), more=_alias_modules(config.program))
    if config.warm and not warm:
        _notify(config, "the workers start as plain processes, because torch is not there or has started threads")
    return lead(config, fast_exit=fast_exit, warm=warm, cores=cores)


def withdraw() -> Cores:
    """Heed nobody but the agent, as whoever imports for workers does; returns the cores that were ours till then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_parent_death_signal(signal.SIGKILL)  # while importing there is nobody to guard yet
    # Modules live as long as the process: looking for garbage among them is a tenth of torch's import, 90 ms.
    gc.disable()
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def import_torch(*, with_jobs: bool, more: tuple[str, ...] = ()) -> bool:
    """Import what the workers will need; False if they cannot be forked from here afterwards."""
    for name in TORCH_MODULES + JOB_MODULES * with_jobs + more:
        try:
            importlib.import_module(name)
        except ImportError:
            if name == "torch":
                return False
    return thread_count() == 1


def _alias_modules(program: Program) -> tuple[str, ...]:
    """Return what to preload for the aliased packages that the program names: a second and more of each worker."""
    named = [name for name in ALIASES if names_word(program, name) and is_alias_active(name)]
    return tuple(module for name in named for module in ALIASES[name].preload)


def lead(config: HostConfig, *, fast_exit: FastExit, warm: bool, cores: Cores) -> Callable[[], None] | None:
    """Be the parent of a run's workers, to its end; in a forked worker, return at once with what it is to run."""
    adopt_orphans()
    guard = Guard(config)
    if guard.agent_is_gone():
        return None
    set_parent_death_signal(signal.SIGCONT)
    gc.freeze()
    gc.enable()
    started = (guard.start(launch, fast_exit=fast_exit if warm else None) for launch in config.workers)
    worker = next(filter(None, started), None) or guard.serve(fast_exit=fast_exit if warm else None)
    if worker is not None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # OpenMP's runtime may have bound the importing thread to one core
        return worker.run
    fast_exit.arm()  # taking torch apart would cost the parent too a quarter of a second, while the agent waits
    return None


class Guard:
    """The workers that live, the lifeline to the agent, and the way up."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._workers: dict[int, int] = {}
        self._control = socket.socket(fileno=config.control_descriptor)
        self._control.setblocking(False)
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._orders = None if config.launches_descriptor is None else socket.socket(fileno=config.launches_descriptor)
        for end in (self._wakeup, self._wakeup_end, self._orders):
            if end is not None:
                end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)

    def start(self, launch: WorkerLaunch, *, fast_exit: FastExit | None) -> WorkerProcess | None:
        """Fork one worker, or without an `ending` start a plain one; returns something only in a forked worker."""
        if fast_exit is None:
            process_id = self._start_plain(launch)
        else:
            process_id = os.fork()
            if process_id == 0:
                signal.set_wakeup_fd(-1)
                for end in (self._control, self._wakeup, self._wakeup_end, self._orders):
                    if end is not None:
                        end.close()
                return enter_forked(launch, self._config, fast_exit)
        rank = launch.config.rank
        self._workers[process_id] = rank
        self._report(Started(rank=rank, time_ns=time.monotonic_ns(), pid=process_id, log_file=launch.config.log_file))
        return None

    def serve(self, *, fast_exit: FastExit | None) -> WorkerProcess | None:
        """Report how workers end, do what the agent says, and return once no descendant is left; in a worker that was
        ordered meanwhile, return what it is.
        """
        if self._config.store_descriptor is not None:
            os.close(self._config.store_descriptor)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            if self._orders is not None:
                selector.register(self._orders, selectors.EVENT_READ)
            self._reap()
            while self._workers or self._orders is not None:
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._obey()
                worker = self._take_order(fast_exit, selector)
                if worker is not None:
                    return worker
                self._reap()
        self._end_all()
        return None

    def _take_order(self, fast_exit: FastExit | None, selector: selectors.BaseSelector) -> WorkerProcess | None:
        """Start the next worker that was ordered, if any; returns something only in a forked worker."""
        if self._orders is None:
            return None
        try:
            order = receive_worker_launch(self._orders)
        except BlockingIOError:
            return None
        if order is None:
            selector.unregister(self._orders)  # or it would be readable for as long as workers live
            self._orders.close()
            self._orders = None
            return None
        worker = self.start(order, fast_exit=fast_exit)
        if worker is None:
            for descriptor in (order.config.rounds_descriptor, order.config.status_descriptor):
                if descriptor is not None:
                    os.close(descriptor)
        return worker

    def agent_is_gone(self) -> bool:
        """Whether the lifeline has ended."""
        try:
            return self._control.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _obey(self) -> None:
        try:
            words = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if not words or KILL in words:
            self._end_all()
            return
        if CUT in words:
            cut_connections(self._workers, hosts=self._config.other_hosts)
        for number in decode_signals(words):
            for process_id in list(self._workers):
                send_signal(process_id, number)

    def _reap(self) -> None:
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process_id == 0:
                return
            self._report_end(process_id, status)

    def _end_all(self) -> None:
        for process_id, status in end_descendants(deadline_seconds=30):
            self._report_end(process_id, status)

    def _report_end(self, process_id: int, status: int) -> None:
        rank = self._workers.pop(process_id, None)
        if rank is not None:
            exit_code = os.waitstatus_to_exitcode(status)
            self._report(Exited(rank=rank, time_ns=time.monotonic_ns(), exit_code=exit_code))

    def _start_plain(self, launch: WorkerLaunch) -> int:
        config = launch.config
        kept = [
            self._config.records_descriptor,
            config.store_descriptor,
            config.status_descriptor,
            config.rounds_descriptor,
        ]
        process = subprocess.Popen(
            python_command("rankless.runtime.plain_worker"),
            stdin=subprocess.PIPE,
            pass_fds=[descriptor for descriptor in kept if descriptor is not None],
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._config_of_one(launch)))
        # The guard reaps its children itself, by pid, whatever Popen thinks of them.
        process.returncode = 0
        return process.pid

    def _config_of_one(self, launch: WorkerLaunch) -> HostConfig:
        return msgspec.structs.replace(self._config, workers=(launch,))

    def _report(self, record: Started | Exited) -> None:
        send_record(record, descriptor=self._config.records_descriptor)


def _notify(config: HostConfig, text: str) -> None:
    record = Notice(rank=0, time_ns=time.monotonic_ns(), text=text)
    send_record(record, descriptor=config.records_descriptor)
