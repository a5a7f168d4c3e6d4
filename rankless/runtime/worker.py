"""A worker from its start to the user's first line, and the records that it sends at its end."""

import contextlib
import functools
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from rankless.config import environment
from rankless.config.extensions import ImportAlias
from rankless.config.process_configs import HostConfig, WorkerConfig, WorkerLaunch
from rankless.config.program_source_files import names_rankless
from rankless.config.run_config import Program
from rankless.records.events import (
    PREEMPTED_EXIT_CODE,
    AnyRecord,
    GroupTeardown,
    Notice,
    Raised,
    ScriptFinished,
    send_record,
)
from rankless.runtime.exception_cause import find_cause, read_message
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_replacement import IN_REPLACEMENT
from rankless.runtime.hooks import import_aliases
from rankless.runtime.hooks.debugging import (
    extend_timeouts,
    refuse_breakpoints,
    refuse_distributed_breakpoints,
    refuse_pdb,
)
from rankless.runtime.hooks.import_hook import FirstImportHook
from rankless.runtime.hooks.watch_written_files_and_silence_tensorboard import (
    TENSORBOARD_WRITER,
    FileWriteMonitor,
    list_ignored,
    silence_writers,
)
from rankless.runtime.linux_process_control import allow_interrupts, set_parent_death_signal
from rankless.runtime.redirect_output import measure_error_log, redirect_output, take_terminal
from rankless.runtime.status_and_stack_writer import publish_status
from rankless.runtime.user_program import exec_command, expand_local_rank, prepare_main
from rankless.terminal import process_title

_MAX_TEXT_CHARACTERS = 16_000


def main(fast_exit: FastExit) -> Callable[[], None]:
    """Be a worker that starts as a plain process (`--no-warm`), whose script itself imports torch.

    Reads the config from standard input, and returns the function that runs the user's program.
    """
    host = msgspec.json.decode(sys.stdin.buffer.read(), type=HostConfig)
    (launch,) = host.workers
    config = launch.config
    inherited = (host.records_descriptor, config.rounds_descriptor, config.recovery_descriptor, *config.inherited)
    for descriptor in inherited:
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    worker = make_worker(launch, host, fast_exit, hide_torch=False)
    return worker.exec if host.program.kind == "command" else worker.run


def start_forked_worker(launch: WorkerLaunch, host: HostConfig, fast_exit: FastExit) -> "WorkerProcess":
    """Turn a fresh fork of the fork server into a worker."""
    for other in host.workers:
        inherited = (other.config.status_descriptor, other.config.recovery_descriptor, *other.config.terminal)
        for descriptor in inherited:
            if other is not launch and descriptor is not None:
                os.close(descriptor)
    worker = make_worker(launch, host, fast_exit, hide_torch=True)
    fast_exit.arm()
    return worker


def make_worker(launch: WorkerLaunch, host: HostConfig, fast_exit: FastExit, *, hide_torch: bool) -> "WorkerProcess":
    """Turn this process into the worker that `launch` describes: descriptors, environment, output and seeds."""
    set_parent_death_signal(signal.SIGKILL)
    # The fork server ignores most of these, and a plain process inherits that.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment.apply(launch.environment)
    config = msgspec.structs.replace(launch.config, process_id=os.getpid(), records_descriptor=host.records_descriptor)
    environment.write_worker_config(config)
    process_title.show_worker(
        process_title.name_program(host.program),
        config.rank,
        config.world_size,
        is_elastic=config.rounds_descriptor is not None,
    )
    worker = WorkerProcess(config, expand_local_rank(host.program, config.local_rank), fast_exit)
    redirect_output(config.log_file, config.error_log_file, on_loss=worker.warn_of_lost_output)
    if config.terminal:
        take_terminal(config.terminal)
    if not worker.may_debug:
        refuse_breakpoints(config.rank)
    random.seed(config.seed)
    if hide_torch and host.preload:
        worker.set_up_at_once()
    else:
        worker.install_import_hooks(hide_torch=hide_torch)
    return worker


class WorkerProcess:
    """A worker that is ready to run its program."""

    def __init__(self, config: WorkerConfig, program: Program, fast_exit: FastExit) -> None:
        self._fast_exit = fast_exit
        self._config = config
        self._program = program
        self._environment_at_start = environment.snapshot()
        warns_of_writes = config.world_size > 1 and not config.is_logical
        self._file_writes = FileWriteMonitor(config, send=self._send) if warns_of_writes else None
        self._outside: Any = None
        """What surrounds a script in the logical view: a `rankless.plain_script.install_effects.InstalledEffects`."""
        if config.is_logical:
            self._outside = importlib.import_module("rankless.plain_script.install_effects").InstalledEffects(
                config.rank,
                self._join_ranks,
                self._notify,
                seed=config.seed or 0,
                ignored=list_ignored(config),
                has_hosts=config.host_count > 1,
            )
        self._meeting: Any = None
        """How its ranks meet, once they have joined."""
        self._count_step: Callable[..., None] | None = None
        if config.status_descriptor is not None:
            self._count_step = publish_status(config.status_descriptor, main_thread=threading.get_ident())
        self._bootstrap_main = sys.modules["__main__"]  # its frame runs until the process ends
        IN_REPLACEMENT.call(self._replace)

    def _replace(self, config: WorkerConfig) -> None:
        """Be another worker from now on, whose place this process takes: see `fork_replacement`."""
        self._config = config
        self._fast_exit.take_process()
        if self._file_writes is not None:
            self._file_writes.take_process(config)
        title = process_title.name_program(self._program)
        process_title.show_worker(title, config.rank, config.world_size)

    @property
    def may_debug(self) -> bool:
        """Whether it has a terminal to itself. In the logical view, rank 0 reads one for all."""
        return bool(self._config.terminal) and (self._config.is_debugged or not self._config.is_logical)

    def install_import_hooks(self, *, hide_torch: bool) -> None:
        """Install the import aliases, and the hook that sets up torch and numpy when the script imports them."""
        actions = {"torch": lambda: self._set_up_torch(late=hide_torch), "numpy": self._set_up_numpy}
        if self._config.rank > 0 and not self._config.is_logical:
            actions[TENSORBOARD_WRITER] = self._silence_tensorboard
        if not self.may_debug:
            actions["pdb"] = lambda: refuse_pdb(self._config.rank)
        if "pdb" in sys.modules and "pdb" in actions:
            actions.pop("pdb")()
        hook = FirstImportHook(actions)
        if hide_torch:
            hook.hide("torch")
        if "numpy" in sys.modules:
            hook.hide("numpy")
        sys.meta_path.insert(0, hook)
        import_aliases.install(self._warn_of_installed)

    def set_up_at_once(self) -> None:
        """Set up torch at once: preloaded modules have bound it, so the script may use it without an import."""
        self.install_import_hooks(hide_torch=False)
        self._set_up_torch(late=False)
        if self._config.rank > 0 and TENSORBOARD_WRITER in sys.modules:
            self._silence_tensorboard()

    def run(self) -> None:
        """Run the user's program. Return, or raise SystemExit, so that threads and atexit callbacks still run."""
        run_main = prepare_main(self._program)
        if self._file_writes is not None:
            self._file_writes.start()
        if self._outside is not None:
            self._surround_script()
        exit_code = self._run_main(run_main)
        # A script that has not imported this module heeds no request to stop.
        stop = sys.modules.get("rankless.runtime.stop_requests")
        if exit_code == 0 and stop is not None and stop.REQUESTS.has_answered:
            exit_code = PREEMPTED_EXIT_CODE
        self._fast_exit.set_exit_code(exit_code)
        rank, now = self._config.rank, time.monotonic_ns()
        self._send(
            ScriptFinished(
                rank=rank,
                time_ns=now,
                exit_code=exit_code,
                output_end=self._measure_log(),
                peak_gpu_memory_bytes=_peak_gpu_memory(),
                is_complete=exit_code == 0 and stop is not None and stop.REQUESTS.is_watching,
            )
        )
        _flush_output()
        if exit_code:
            raise SystemExit(exit_code)

    def exec(self) -> NoReturn:
        """Replace this process by the user's command. The fork server reports how the command ends."""
        environment.forget_worker_config()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        allow_interrupts()
        try:
            exec_command(self._program)
        except OSError as error:
            self._report_error(_remove_own_frames(error))
            raise SystemExit(f"{self._program.target}: {error.strerror}") from None

    def warn_of_lost_output(self, reason: str) -> None:
        """Warn the user that the log file has lost lines."""
        rank, log_file = self._config.rank, self._config.log_file
        self._notify(f"rank {rank}'s output is lost from here on, training continues ({reason}: {log_file})")

    def _run_main(self, run_main: Callable[[], None]) -> int:
        try:
            allow_interrupts()
            exit_code = _run_to_exit_code(run_main)
            if exit_code == 0:
                _finish_context()
                if self._outside is not None:
                    self._outside.finish()
        except BaseException as error:
            if self._outside is not None:
                self._outside.end()
            if self._config.is_logical:
                importlib.import_module("rankless.plain_script.hide_ranks").explain(error)
            self._report_error(_remove_own_frames(error))
            sys.excepthook(type(error), error, error.__traceback__)
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        return exit_code

    def _report_error(self, error: BaseException) -> None:
        rank, now = self._config.rank, time.monotonic_ns()
        self._send(Raised(rank=rank, time_ns=now, output_start=self._measure_log(), **_error_fields(error)))

    def _measure_log(self) -> int | None:
        _flush_output()
        return measure_error_log(self._config.error_log_file or self._config.log_file)

    def _report_teardown(self, error: BaseException | None) -> None:
        rank, now = self._config.rank, time.monotonic_ns()
        fields = {} if error is None or isinstance(error, SystemExit) else _error_fields(error)
        self._send(GroupTeardown(rank=rank, time_ns=now, **fields))

    def _surround_script(self) -> None:
        """Let the script's effects happen once, and its sources of numbers be equal on all ranks."""
        self._outside.install(shares_input=not self._config.is_debugged)
        for name in self._outside.patched:
            self._outside.patch(name)
        waiting = set(self._outside.patched) - {"torch", "numpy.random"}
        actions: dict[str, Callable[[], None]] = {
            name: functools.partial(self._outside.patch, name) for name in waiting
        }
        sys.meta_path.insert(0, FirstImportHook(actions))

    def _join_ranks(self) -> Any:
        """Return how the ranks meet. The first call imports torch, as the script will."""
        importlib.import_module("torch")
        return self._meeting

    def _set_up_torch(self, *, late: bool) -> None:
        alone = contextlib.nullcontext() if self._outside is None else self._outside.effects.alone()
        with alone:
            self._prepare_torch(late=late)
        if self._outside is not None:
            self._outside.patch("torch")

    def _prepare_torch(self, *, late: bool) -> None:
        # Torch has imported numpy, so numpy needs its seed too, even if the script never names it.
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")
        importlib.import_module("rankless.runtime.hooks.torch_settings").apply(
            seed=self._config.seed,
            threads=environment.user_threads(),
            dtype=self._config.dtype,
            before_teardown=self._report_teardown,
            on_step=self._count_step,
        )
        if self._may_share_memory():
            importlib.import_module("rankless.runtime.hooks.init_process_group").use_fastest_group(
                self._config.rank,
                self._config.world_size,
                self._notify,
                has_several_hosts=self._config.backend == "hierarchical",
            )
        distributed = sys.modules["torch.distributed"]
        if not self.may_debug and distributed.is_available():
            refuse_distributed_breakpoints(distributed, self._config.rank)
        if self._config.is_debugged:
            extend_timeouts(importlib.import_module("torch.distributed.distributed_c10d"), distributed)
        if self._config.rounds_descriptor is None:  # the ranks of an elastic job change
            importlib.import_module("rankless.runtime.hooks.init_process_group").use_run_store(self._config)
        if self._file_writes is not None:
            self._file_writes.patch_torch_save(importlib.import_module("torch.serialization"))
        if self._config.rank == 0:  # all ranks run the same script
            importlib.import_module("rankless.runtime.hooks.script_mistakes").warn_of_mistakes(
                self._notify, world_size=1 if self._config.is_logical else self._config.world_size
            )
        if self._config.is_logical:
            logical_view = importlib.import_module("rankless.runtime.begin_logical_view")
            self._meeting = logical_view.begin_logical_view(self._outside.effects)
        if self._config.observation.is_reference or self._config.observation.is_foreign:
            importlib.import_module("rankless.verify.recording.recorder_of_scripts_without_jobs").record_reference_run(
                self._config
            )
        names = environment.changes_too_late(self._environment_at_start, environment.snapshot()) if late else []
        if names and self._config.rank == 0:
            self._notify(
                f"{', '.join(names)} set too late: torch was imported before the script set it; "
                "to make it effective use `rankless run --no-warm`, or `rankless torchrun --start-method spawn`"
            )

    def _may_share_memory(self) -> bool:
        """Whether ranks of this run share memory. Those of an elastic job may join on other hosts."""
        config = self._config
        wants = config.backend in ("shared_memory", "hierarchical")
        return wants and config.world_size > 1 and config.rounds_descriptor is None

    def _warn_of_installed(self, alias: ImportAlias, file: str) -> None:
        # Its own launcher's variables bring it together with the other ranks, or that launcher warns itself.
        size = self._config.world_size
        is_served = not environment.snapshot().keys().isdisjoint(alias.launcher_variables)
        if self._config.rank == 0 and size > 1 and not is_served:
            self._notify(alias.warning.format(file=file, world_size=size))

    def _silence_tensorboard(self) -> None:
        # Ranks of other programs may each have a writer on purpose.
        if names_rankless(self._program):
            module = sys.modules[TENSORBOARD_WRITER]
            silence_writers(module, rank=self._config.rank, notify=self._notify)

    def _set_up_numpy(self) -> None:
        # With None it draws a seed, so that forks of one process differ.
        seed = None if self._config.seed is None else self._config.seed % 2**32
        importlib.import_module("numpy.random").seed(seed)
        if self._outside is not None:
            self._outside.patch("numpy.random")

    def _notify(self, text: str) -> None:
        self._send(Notice(rank=self._config.rank, time_ns=time.monotonic_ns(), text=text))

    def _send(self, record: AnyRecord) -> None:
        # A process that the script forks inherits all this, but its end is not the worker's.
        if self._config.records_descriptor is not None and os.getpid() == self._config.process_id:
            send_record(record, descriptor=self._config.records_descriptor)


def _error_fields(error: BaseException) -> dict[str, str]:
    cause = find_cause(error)
    return {
        "cause": cause.text,
        "line": cause.line,
        "error_type": type(error).__name__,
        "message": read_message(error)[:_MAX_TEXT_CHARACTERS],
        "traceback": "".join(traceback.format_exception(error))[-_MAX_TEXT_CHARACTERS:],
    }


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have put any object there
            stream.flush()


def _run_to_exit_code(run_main: Callable[[], None]) -> int:
    try:
        run_main()
    except SystemExit as exit_request:
        return _exit_code_of(exit_request)
    return 0


def _finish_context() -> None:
    # A script that has not imported this module has joined nothing.
    current_context = sys.modules.get("rankless.runtime.current_context")
    if current_context is not None:
        current_context.finish()


def _peak_gpu_memory() -> int | None:
    # A script that has not imported this module uses no GPU.
    cuda = sys.modules.get("torch.cuda")
    return int(cuda.max_memory_allocated()) if cuda is not None and cuda.is_initialized() else None


def _exit_code_of(exit_request: SystemExit) -> int:
    code = exit_request.code
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _remove_own_frames(error: BaseException) -> BaseException:
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_globals.get("__name__", "").startswith("rankless.runtime."):
        shown = shown.tb_next
    return error.with_traceback(shown)
