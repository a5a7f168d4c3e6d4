"""The fork server, the parent of a host's workers: imports torch once, forks the workers, and reaps them.

Note [one thread, no computing]: a forked child has only the thread that forked. If the fork server computed anything
with torch, its children would wait forever for torch's threads, which exist in the fork server alone. So the fork
server imports, and does nothing else.

Note [guard]: the fork server runs in a session of its own, adopts orphaned descendants, and reads a control pipe from
the agent. At the end of file the agent is gone, however it ended: the fork server stops and then kills everything below
it. Workers get the parent-death signal KILL for the case that the fork server itself is killed. The fork server gets
CONT, so that it cannot stay stopped when the agent dies.
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

from rankless.config.extensions import list_aliases
from rankless.config.process_configs import HostConfig, WorkerLaunch
from rankless.config.program_source_files import names_rankless, names_word
from rankless.records.encoding import encode_json
from rankless.records.events import Exited, Notice, Started, send_record
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_and_spawn_server_messages import (
    CUT,
    KILL,
    decode_signals,
    receive_worker_launch,
    split_adoptions,
)
from rankless.runtime.hooks.import_aliases import is_alias_active
from rankless.runtime.linux_process_control import (
    EndedChild,
    adopt_orphans,
    delay_interrupts,
    end_descendants,
    reap_child,
    send_signal,
    set_parent_death_signal,
    thread_count,
)
from rankless.runtime.preload_option import preload
from rankless.runtime.release_waiting_ranks import cut_connections, end_shared_groups
from rankless.runtime.subprocess_command import python_command
from rankless.runtime.worker import WorkerProcess, start_forked_worker
from rankless.terminal import process_title

TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "rankless.runtime.hooks.torch_settings",
    "numpy.random",  # numpy imports it at its first use, which takes 8 ms in each worker
    "rankless.runtime.hooks.script_mistakes",
)
JOB_MODULES = (
    "torch._functorch.aot_autograd",
    "torch.fx",
    "rankless.api",
    "rankless.jobs.job",
    "rankless.data.loader",
)
"""The further modules that the first job call needs. The fork server imports them for programs that use Rankless."""

OPTIMIZER_MODULES = ("torch._dynamo",)
"""What the first optimizer of a process imports, which takes about as long as PyTorch itself."""

GROUP_MODULES = ("rankless.runtime.hooks.init_process_group", "rankless.runtime.process_groups")

LOGICAL_MODULES = ("rankless.runtime.begin_logical_view", "rankless.plain_script.install_effects")
"""What a script in the logical view needs besides."""

Cores = set[int] | None


def main(fast_exit: FastExit) -> Callable[[], None] | None:
    """Serve until no worker is left. In a forked worker, return at once the function that the worker runs."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=HostConfig)
    process_title.show_fork_server(config.program)
    cores = prepare_process()
    warm = config.warm and preload_modules(
        with_jobs=names_rankless(config.program) or is_logical(config),
        more=_list_more_modules(config),
    )
    if config.warm and not warm:
        _notify(config, "the workers start as plain processes, because torch is not installed or has started threads")
    elif config.preload:
        outcome = preload(config.preload, config.program)
        for message in outcome.messages:
            _notify(config, message)
        warm = outcome.may_fork
    return serve_run(config, fast_exit=fast_exit, warm=warm, cores=cores)


def is_logical(config: HostConfig) -> bool:
    """Return whether the workers of a host run their script in the logical view."""
    return any(each.config.is_logical for each in config.workers)


def prepare_process() -> Cores:
    """Make this process ignore all signals but the agent's, and return the CPU cores that it may use."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    delay_interrupts()
    set_parent_death_signal(signal.SIGKILL)  # while it imports there are no workers to end
    # Modules live as long as the process. To search them for garbage is a tenth of torch's import time, 90 ms.
    gc.disable()
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def preload_modules(*, with_jobs: bool, more: tuple[str, ...] = ()) -> bool:
    """Import what the workers need. Return whether this process may fork workers afterwards."""
    for name in TORCH_MODULES + JOB_MODULES * with_jobs + more:
        try:
            importlib.import_module(name)
        except ImportError:
            if name == "torch":
                return False
    return thread_count() == 1


def _list_more_modules(config: HostConfig) -> tuple[str, ...]:
    """Return what else to preload for the program, which each worker would import itself otherwise."""
    program, aliases = config.program, list_aliases()
    # The aliased packages that the program names take a second and more.
    named = [name for name in aliases if names_word(program, name) and is_alias_active(name)]
    modules = [module for name in named for module in aliases[name].preload]
    if names_word(program, "optim"):
        modules += OPTIMIZER_MODULES
    if is_logical(config):
        modules += LOGICAL_MODULES
    shares_memory = ("shared_memory", "hierarchical")
    if any(each.config.backend in shares_memory and each.config.world_size > 1 for each in config.workers):
        modules += GROUP_MODULES
    return tuple(modules)


def serve_run(config: HostConfig, *, fast_exit: FastExit, warm: bool, cores: Cores) -> Callable[[], None] | None:
    """Be the fork server of one run until it ends. In a forked worker, return at once the function that it runs."""
    adopt_orphans()
    server = ForkServer(config)
    if server.is_agent_gone():
        return None
    set_parent_death_signal(signal.SIGCONT)
    gc.freeze()
    gc.enable()
    started = (server.start_worker(launch, fast_exit=fast_exit if warm else None) for launch in config.workers)
    worker = next(filter(None, started), None) or server.serve(fast_exit=fast_exit if warm else None)
    if worker is not None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # OpenMP's runtime may have bound the importing thread to one core
        return worker.run
    fast_exit.arm()  # the teardown of torch would take another quarter of a second while the agent waits
    return None


class ForkServer:
    """The workers that are alive, the control pipe from the agent, and the channel of the records."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._workers: dict[int, int] = {}
        self._orphans: dict[int, EndedChild] = {}
        """Ended children that were no workers, or none yet, by process id."""
        self._control = socket.socket(fileno=config.control_descriptor)
        self._control.setblocking(False)
        self._wakeup, self._wakeup_end = socket.socketpair()
        launches = config.launches_descriptor
        self._launches = None if launches is None else socket.socket(fileno=launches)
        for end in (self._wakeup, self._wakeup_end, self._launches):
            if end is not None:
                end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)

    def start_worker(self, launch: WorkerLaunch, *, fast_exit: FastExit | None) -> WorkerProcess | None:
        """Fork one worker, or without `fast_exit` start a plain process. Return a value only in a forked worker."""
        if fast_exit is None:
            process_id = self._start_plain_worker(launch)
        else:
            process_id = os.fork()
            if process_id == 0:
                signal.set_wakeup_fd(-1)
                for end in (self._control, self._wakeup, self._wakeup_end, self._launches):
                    if end is not None:
                        end.close()
                return start_forked_worker(launch, self._config, fast_exit)
        self._take(launch.config.rank, process_id, launch.config.log_file)
        return None

    def _take(self, rank: int, process_id: int, log_file: str) -> None:
        """Take a process for a worker, whose end is to be reported."""
        self._workers[process_id] = rank
        self._send(Started(rank=rank, time_ns=time.monotonic_ns(), pid=process_id, log_file=log_file))
        if process_id in self._orphans:
            self._report_exit(self._orphans.pop(process_id))

    def serve(self, *, fast_exit: FastExit | None) -> WorkerProcess | None:
        """Report how workers end, and do what the agent demands, until no descendant is left.

        In a worker that is forked meanwhile, return that worker at once.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            if self._launches is not None:
                selector.register(self._launches, selectors.EVENT_READ)
            self._reap()
            # As long as the agent may ask for one more, the server outlives its last worker.
            while self._workers or self._launches is not None:
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._execute_commands()
                worker = self._start_next_launch(fast_exit, selector)
                if worker is not None:
                    return worker
                self._reap()
        self._end_all()
        return None

    def is_agent_gone(self) -> bool:
        """Return whether the control pipe has reached its end of file."""
        try:
            return self._control.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _start_next_launch(self, fast_exit: FastExit | None, selector: selectors.BaseSelector) -> WorkerProcess | None:
        """Start the next worker that the agent asks for, if any. Return a value only in a forked worker."""
        if self._launches is None:
            return None
        try:
            launch = receive_worker_launch(self._launches)
        except BlockingIOError:
            return None
        if launch is None:
            selector.unregister(self._launches)  # or it would be readable for as long as workers live
            self._launches.close()
            self._launches = None
            return None
        worker = self.start_worker(launch, fast_exit=fast_exit)
        if worker is None:
            for descriptor in (launch.config.rounds_descriptor, launch.config.status_descriptor):
                if descriptor is not None:
                    os.close(descriptor)
        return worker

    def _execute_commands(self) -> None:
        try:
            commands = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            commands = b""  # as at the end of file: the agent is gone
        is_gone = not commands
        adopted, commands = split_adoptions(commands)
        log_files = {launch.config.rank: launch.config.log_file for launch in self._config.workers}
        for rank, process_id in adopted:
            self._take(rank, process_id, log_files[rank])
        if is_gone or KILL in commands:
            self._end_all()
            return
        if CUT in commands:
            ports = {launch.config.store_port for launch in self._config.workers}
            cut_connections(self._workers, hosts=self._config.other_hosts, store_port=next(iter(ports), None))
            end_shared_groups(self._workers)
        for number in decode_signals(commands):
            for process_id in list(self._workers):
                send_signal(process_id, number)

    def _reap(self) -> None:
        while True:
            try:
                ended = reap_child()
            except ChildProcessError:
                return
            if ended is None:
                return
            self._report_exit(ended)

    def _end_all(self) -> None:
        for ended in end_descendants(deadline_seconds=30):
            self._report_exit(ended)

    def _report_exit(self, ended: EndedChild) -> None:
        rank = self._workers.pop(ended.process_id, None)
        if rank is None:
            self._orphans[ended.process_id] = ended
        else:
            exit_code, now = os.waitstatus_to_exitcode(ended.status), time.monotonic_ns()
            self._send(Exited(rank=rank, time_ns=now, exit_code=exit_code, peak_memory_bytes=ended.peak_memory_bytes))

    def _start_plain_worker(self, launch: WorkerLaunch) -> int:
        config = launch.config
        kept = [
            self._config.records_descriptor,
            config.status_descriptor,
            config.rounds_descriptor,
            config.recovery_descriptor,
            *config.inherited,
            *config.terminal,
        ]
        process = subprocess.Popen(
            python_command("rankless.runtime.worker"),
            stdin=subprocess.PIPE,
            pass_fds=[descriptor for descriptor in kept if descriptor is not None],
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(encode_json(msgspec.structs.replace(self._config, workers=(launch,))))
        # The fork server reaps its children itself, by process id. Popen must not wait for this one.
        process.returncode = 0
        return process.pid

    def _send(self, record: Started | Exited) -> None:
        send_record(record, descriptor=self._config.records_descriptor)


def _notify(config: HostConfig, text: str) -> None:
    record = Notice(rank=0, time_ns=time.monotonic_ns(), text=text)
    send_record(record, descriptor=config.records_descriptor)
