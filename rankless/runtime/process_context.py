"""The context of a process that has joined its world: mesh, process group, and the channel for records."""

import atexit
import importlib
import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist

from rankless.checkpoint import Saver
from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.desync_detection import DesyncDetector
from rankless.config import environment
from rankless.config.environment import TorchrunWorker
from rankless.config.extensions import find_extension, import_declared
from rankless.config.plan_file import read_plan
from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import Backend
from rankless.context.all_or_nothing_operations import Operations
from rankless.context.extension_participants import JointEvents
from rankless.context.progress_measurement import ProgressMeter
from rankless.context.step_events import StepEvents, StepLimit, StepParticipant
from rankless.context.world import RunSettings, StartedWorkers, World
from rankless.errors import ConfigError, JoinError, RanklessError
from rankless.jobs.programs.program_recorder import make_program_recorder
from rankless.parallel.mesh import Mesh, SyncPointChecker
from rankless.records.events import AnyRecord, CheckpointLoaded, Notice, StopsHeeded, send_record
from rankless.runtime.elastic_round import ElasticMember, Round
from rankless.runtime.fork_replacement import IN_REPLACEMENT
from rankless.runtime.process_groups import make_world_group, make_world_mesh
from rankless.runtime.rendezvous.file import join_file_rendezvous
from rankless.runtime.rendezvous.find_rendezvous import (
    RendezvousInfo,
    parameters_from_torchrun,
    print_notice,
)
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters
from rankless.runtime.rendezvous.join_at_tcp_address import join_tcp_rendezvous
from rankless.runtime.status_and_stack_writer import publish_totals
from rankless.runtime.worker_recovery import WorkerRecovery, join_round_world, leave_round_world
from rankless.user_code import caller_line
from rankless.verify.recording.input_digests import InputDigests
from rankless.verify.recording.job_memory_and_modules_outside_jobs import survey_script
from rankless.verify.recording.run_recorder import RunRecorder
from rankless.verify.recording.value_probes import ValueInspector

if TYPE_CHECKING:
    from rankless.logical_view.tensor import LogicalView

_JOINS = itertools.count()
"""Numbers how often this process has joined again. All ranks do so equally often."""
RecordObserver = Callable[[AnyRecord], None]
"""Receives the records of a process."""


class ProcessContext:
    """The state of one process from the moment it joins its world until it leaves."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        local_rank: int,
        observer: RecordObserver,
        config: WorkerConfig | None,
        progress: bool,
        end_group: Callable[[], None] | None,
    ) -> None:
        self.local_rank = local_rank
        self.process_id = os.getpid()
        self.line = caller_line()
        """The line where the script joined: its first call of a job, a loader or the like."""
        self._observer = observer
        self._rank = mesh.rank
        self._notified: set[str] = set()
        self._end_group = end_group
        self._has_left = False
        detector = DesyncDetector(mesh, notify=self.notify) if mesh.size > 1 else None
        self._desync_detector: SyncPointChecker | None = detector
        self._has_agent = config is not None
        self._config = config
        workers = replace(mesh, desync_detector=self._desync_detector)
        joint = JointEvents(config, workers)
        recovery = None if mesh.size == 1 else self._make_recovery(joint)
        self.world = World(
            mesh=workers if joint.workers is None else Mesh.solo(mesh.device),
            joint=joint,
            notify=self.notify,
            send_record=observer,
            settings=RunSettings() if config is None else self._make_settings(config),
            events=StepEvents(self._list_participants(progress=progress, recovers=recovery is not None)),
            started=self._number_workers(mesh),
            operations=Operations(recovery),
            recovery=recovery,
        )
        if recovery is not None:
            recovery.begin(self.world)
        self.saver = Saver(mesh=self.world.workers, owner=self.world.owner, run_for_all=self._run_for_all)
        self.logical: LogicalView | None = None
        """The logical view, if the script runs in it."""
        atexit.register(self.leave)

    def _make_recovery(self, joint: JointEvents) -> WorkerRecovery | None:
        """Return what continues without lost workers; None if the run needs all of them."""
        config = self._config
        if config is None or config.recovery_descriptor is None:
            return None
        IN_REPLACEMENT.call(self._take_place)
        return WorkerRecovery(
            ElasticMember(socket.socket(fileno=config.recovery_descriptor), config),
            joint,
            replaces=config.replaces_workers,
            leave_round=lambda: leave_round_world(self.world),
            join_round=self.join_round,
            enter=self.enter,
        )

    def _number_workers(self, mesh: Mesh) -> StartedWorkers:
        """Return the workers with which the run begins."""
        config, started = self._config, StartedWorkers.of(mesh)
        if config is None:
            return started
        has_others = any(axis.role != "data" and axis.size > 1 and not axis.stage_workers for axis in config.mesh)
        axes = config.mesh if has_others or config.plan is not None else ()
        return replace(started, axes=axes, hosts=config.hosts_of_copies, present_hosts=config.hosts_of_copies)

    @property
    def sees_one_process(self) -> bool:
        """Whether the script runs in the logical view, also if it has not imported torch yet."""
        return self.logical is not None or (self._config is not None and self._config.is_logical)

    def _make_settings(self, config: WorkerConfig) -> RunSettings:
        """Return what the command line asks of jobs."""
        observation, rank = config.observation, self._rank
        if observation.is_foreign:
            return RunSettings()  # the script is recorded from outside
        inspected = None if config.recording is None else observation.inspected
        return RunSettings(
            perturbation_seed=config.perturbation_seed,
            dtype=None if config.dtype is None else getattr(torch, config.dtype),
            programs=make_program_recorder(config, rank),
            plan=None if config.plan is None else read_plan(config.plan),
            inspector=None if inspected is None else ValueInspector(str(config.recording), rank, inspected),
        )

    def _list_participants(self, *, progress: bool, recovers: bool) -> Iterator[StepParticipant]:
        """Yield the participants of the run, in the order in which they hear of a step."""
        # A foreign script is recorded from outside.
        config = None if self._config is None or self._config.observation.is_foreign else self._config
        if config is not None and config.recording is not None:
            inputs = InputDigests() if config.observation.inputs else None
            if inputs is not None:
                inputs.start()
            yield RunRecorder(config.recording, self._rank, survey=survey_script, inputs=inputs)
        if config is not None and config.observation.programs is not None and config.recording is None:
            # With the logical view.
            step_recorder = importlib.import_module("rankless.jobs.programs.logical_step_recorder")
            yield step_recorder.StepRecorder(lambda: self.world.settings.programs)
        if self._rank == 0 or recovers:  # another worker may take rank 0's place
            yield self._make_meter(progress=progress)
        for name in () if self._config is None else self._config.options:
            extension = find_extension(name)
            if extension is not None and extension.participant:
                make = import_declared(name, "participant", extension.participant, name="make_participant")
                yield make(self._config)
        if config is not None and config.observation.stop_after_steps is not None:
            steps = config.observation.stop_after_steps
            yield StepLimit(steps, at_end=lambda: self._close_recorders(stopped=True))

    def _close_recorders(self, *, stopped: bool) -> None:
        self.world.events.close(stopped=stopped)
        if self.world.settings.programs is not None:
            self.world.settings.programs.finish(survey_script(()).jobs)

    def notify(self, text: str) -> None:
        """Show the user a notice, once. All ranks have the same notices, so only rank 0 sends them."""
        if self._rank == 0 and text not in self._notified:
            self._notified.add(text)
            self._observer(Notice(rank=0, time_ns=time.monotonic_ns(), text=text))

    def finish(self) -> None:
        """Wait for a save in the background and for participants, at the end of a script that did not fail.

        Raises `RanksDiverged` if other ranks still wait for this one, and the error of a
        participant whose last step failed.
        """
        self.saver.join()
        self.world.joint.finish()
        self.world.operations.end(self.world.workers)
        if self._desync_detector is not None:
            detector, self._desync_detector = self._desync_detector, None
            detector.end()

    def leave(self) -> None:
        """Close the recordings, report a save that failed, and destroy the process group that joining has made."""
        if os.getpid() != self.process_id or self._has_left:
            return
        self._has_left = True
        atexit.unregister(self.leave)  # or the interpreter would keep this object, and with it the store, until its end
        self.world.passes.warn_unfinished(self.notify)
        if not self._has_agent and not hasattr(sys, "last_value"):
            self._finish_or_exit()
        if (failure := self.saver.close()) is not None:
            print(f"rankless: {failure}", file=sys.stderr)
        self._close_recorders(stopped=False)
        self.world.joint.close()
        if self._end_group is not None and dist.is_initialized():
            end_group, self._end_group = self._end_group, None
            end_group()

    def _run_for_all(self, attempt: Callable[[], Any]) -> Any:
        return self.world.run_for_all(lambda _: attempt())

    def join_round(self, joined: Round) -> World:
        """Leave the process group, join that of a round, and return a world with it. Collective."""
        assert self._config is not None
        world, self._end_group = join_round_world(self.world, joined, self._config.backend)
        return world

    def _take_place(self, config: WorkerConfig) -> None:
        """Be the context of the worker whose place this process takes."""
        self._config, self.process_id, self.local_rank = config, os.getpid(), config.local_rank

    def enter(self, world: World) -> None:
        """Use the world of a round from now on."""
        self.world, self._rank, self._desync_detector = world, world.mesh.rank, world.mesh.desync_detector
        self.saver.mesh, self.saver.owner = world.workers, world.owner

    def _make_meter(self, *, progress: bool) -> ProgressMeter:
        config, record = self._config, self._record_progress if progress else None
        if config is None or config.status_descriptor is None:
            return ProgressMeter(rank=0, record=record)
        return ProgressMeter(rank=0, record=record, publish_totals=publish_totals(config.status_descriptor))

    def _record_progress(self, record: AnyRecord) -> None:
        if self._rank == 0:
            self._observer(record)

    def make_group(self) -> None:
        """Make a process group of size one, for the collectives of a process that is alone."""
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, missing in the stubs
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self._end_group = dist.destroy_process_group

    def _finish_or_exit(self) -> None:
        """Finish, and exit with code 1 on an error: the ending interpreter would only print it and exit with 0."""
        try:
            self.finish()
        except RanklessError as error:
            print(f"rankless: {type(error).__name__}{error}", file=sys.stderr, flush=True)
            os._exit(1)


def join(
    *,
    make_observer: Callable[[], RecordObserver],
    find_info: Callable[[], RendezvousInfo],
    parameters: RendezvousParameters | None = None,
    again: bool = False,
) -> ProcessContext:
    """Join the world of this process, or make a world of one process if no launcher started it.

    Args:
        make_observer: Returns what receives the records of a process without an agent.
        find_info: Returns rank, size and store of this process. Called only if they are needed.
        parameters: Where to join, if the script has said it with `rankless.init`.
        again: Whether this process has joined before, and left.

    Raises:
        JoinError: If some ranks do not join in time, or `parameters` contradict the launcher.
    """
    config = environment.read_worker_config()
    if config is not None:
        _require_same_rank(config, parameters)
        return _join_as_worker(config, find_info, again)
    if parameters is not None:
        return _join_with_parameters(parameters, make_observer)
    launched = environment.read_launched_worker()
    if launched is not None and launched.world_size > 1 and not dist.is_initialized():
        return _join_with_store(find_info(), make_observer)
    torchrun = environment.read_torchrun()
    # A forked child of a worker has inherited the worker's group, and must not use it.
    may_join = not environment.is_child_of_worker()
    if may_join and (torchrun is not None or (dist.is_available() and dist.is_initialized())):
        return _join_existing(torchrun, make_observer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ProcessContext(
        mesh=Mesh.solo(device), local_rank=0, observer=make_observer(), config=None, progress=True, end_group=None
    )


def _require_same_rank(config: WorkerConfig, parameters: RendezvousParameters | None) -> None:
    if parameters is not None and (parameters.rank, parameters.world_size) != (config.rank, config.world_size):
        raise JoinError(
            expected=f"rank={config.rank} and world_size={config.world_size}, as `rankless run` started this process",
            found=f"rank={parameters.rank} and world_size={parameters.world_size} in rankless.init",
            fix="call rankless.init() without arguments under a launcher",
        )


def _join_as_worker(config: WorkerConfig, find_info: Callable[[], RendezvousInfo], again: bool) -> ProcessContext:
    if config.observation.is_reference:
        raise ConfigError(
            expected="a reference script in plain PyTorch, which shows what the script computes without Rankless",
            found="one that calls Rankless",
            fix="remove rankless from the script given as --against: use zero_grad(), backward() and step() instead",
        )
    device = _use_device(config.device)
    end_group = None
    if config.world_size > 1 and not dist.is_initialized():
        store = find_info().store
        if again:  # the keys of the group before are still there
            store = dist.PrefixStore(f"rankless/again/{next(_JOINS)}", store)  # type: ignore[attr-defined]  # not in the stubs
        end_group = make_world_group(
            config.backend,
            device,
            store=store,
            rank=config.rank,
            world_size=config.world_size,
            must_be_abortable=config.recovery_descriptor is not None,
        )
    descriptor = config.records_descriptor

    def observer(record: AnyRecord) -> None:
        if descriptor is not None:
            needed = Notice | CheckpointLoaded | StopsHeeded
            send_record(record, descriptor=descriptor, blocking=isinstance(record, needed))

    mesh = make_world_mesh(device, config.mesh)
    context = ProcessContext(
        mesh=mesh,
        local_rank=config.local_rank,
        observer=observer,
        config=config,
        progress=config.progress,
        end_group=end_group,
    )
    if config.seed is None:
        _synchronize_seeds(mesh, context)
    return context


def _join_with_parameters(
    parameters: RendezvousParameters, make_observer: Callable[[], RecordObserver]
) -> ProcessContext:
    join_ranks = join_tcp_rendezvous if parameters.kind == "tcp" else join_file_rendezvous
    rendezvous = join_ranks(parameters, print_notice)
    local_rank = rendezvous.local_rank(parameters.rank)
    device, backend = _select_device(local_rank)
    if rendezvous.is_on_one_host:
        environment.prefer_loopback()
    end_group = make_world_group(
        backend, device, store=rendezvous.store, rank=parameters.rank, world_size=parameters.world_size
    )
    return _make_context_without_agent(device, local_rank, make_observer, end_group)


def _join_with_store(info: RendezvousInfo, make_observer: Callable[[], RecordObserver]) -> ProcessContext:
    """Join the other ranks in a store that they share. A process may do so any number of times."""
    local_rank = info.assignment.local_rank if info.assignment is not None else 0
    device, backend = _select_device(local_rank)
    join_count = info.store.add(f"rankless/times/{info.rank}", 1)
    store = dist.PrefixStore(f"rankless/group/{join_count}", info.store)  # type: ignore[attr-defined]  # not in the stubs
    end_group = make_world_group(backend, device, store=store, rank=info.rank, world_size=info.size)
    return _make_context_without_agent(device, local_rank, make_observer, end_group)


def _join_existing(torchrun: TorchrunWorker | None, make_observer: Callable[[], RecordObserver]) -> ProcessContext:
    """Join where torchrun, or a launcher like it, says; or use the process group that the script has made."""
    if torchrun is not None and torchrun.world_size != 1 and not dist.is_initialized():
        return _join_with_parameters(parameters_from_torchrun(torchrun), make_observer)
    local_rank = torchrun.local_rank if torchrun is not None else 0
    device, _ = _select_device(local_rank)
    return _make_context_without_agent(device, local_rank, make_observer, None)


def _make_context_without_agent(
    device: torch.device,
    local_rank: int,
    make_observer: Callable[[], RecordObserver],
    end_group: Callable[[], None] | None,
) -> ProcessContext:
    mesh = make_world_mesh(device)
    observer = make_observer() if mesh.rank == 0 else _drop_record
    context = ProcessContext(
        mesh=mesh, local_rank=local_rank, observer=observer, config=None, progress=True, end_group=end_group
    )
    _synchronize_seeds(mesh, context)
    return context


def _select_device(local_rank: int) -> tuple[torch.device, Backend]:
    """Return the GPU of this number and NCCL, or the CPU and shared memory if there is no such GPU."""
    number = 0 if environment.has_own_gpu() else local_rank
    own_gpu = torch.cuda.is_available() and number < torch.cuda.device_count()
    return _use_device(f"cuda:{number}" if own_gpu else "cpu"), "nccl" if own_gpu else "shared_memory"


def _synchronize_seeds(mesh: Mesh, context: ProcessContext) -> None:
    """Seed all ranks' generators with rank 0's seed, and notify the user, if the seeds differ."""
    own = (torch.initial_seed() % 2**64).to_bytes(8, "little")
    seeds = [int.from_bytes(data, "little") for data in all_gather_bytes(own, mesh=mesh)]
    if len(set(seeds)) == 1:
        return  # as under `rankless run`
    torch.manual_seed(seeds[0])
    random.seed(seeds[0])
    numpy.random.seed(seeds[0] % 2**32)
    context.notify(
        "the ranks' random generators started from different seeds; from here on all continue from rank 0's "
        "(models made before get rank 0's values at a job's first call)"
    )


def _use_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _drop_record(_record: AnyRecord) -> None:
    """Ignore a record: only rank 0's records are shown."""
