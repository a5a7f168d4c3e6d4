"""A process that has joined its world: group, device, the way up. The only maker of process groups."""

import atexit
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from rankless.checkpoint import Saver
from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.desync_detection import DesyncDetector
from rankless.config import environment
from rankless.config.worker_config import WorkerConfig
from rankless.context.progress_meter import ProgressMeter
from rankless.context.step_limit import StepLimit
from rankless.context.world import World
from rankless.errors import ConfigError, JoinError, RanklessError
from rankless.jobs.program_records import ProgramRecorder
from rankless.parallel.mesh import Mesh
from rankless.records.channel import send_record
from rankless.records.events import AnyRecord, Notice
from rankless.runtime.rendezvous.address import RendezvousParameters
from rankless.runtime.rendezvous.file import join_file_rendezvous
from rankless.runtime.rendezvous.job_store import (
    JOINING_SECONDS,
    STORE_TIMEOUT,
    RendezvousInfo,
    parameters_from_torchrun,
    print_notice,
)
from rankless.runtime.rendezvous.tcp import TELL_AFTER_SECONDS, join_tcp_rendezvous
from rankless.user_code import caller_line
from rankless.verify.recording.recorder import RunRecorder
from rankless.verify.recording.script_survey import survey_script
from rankless.verify.recording.value_inspection import ValueInspector
from rankless.verify.recording.value_recorder import ValueRecorder

JOINED = "rankless/joined"
"""Under this name the store counts the ranks that have made the group."""
TOLD = "rankless/told"
"""Under this name it counts those that know that all have."""

Observer = Callable[[AnyRecord], None]


class ProcessContext:
    """What one process is in its job, from joining to leaving."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        local_rank: int,
        up: Observer,
        config: WorkerConfig | None,
        progress: bool,
        end_group: Callable[[], None] | None,
    ) -> None:
        self.local_rank = local_rank
        self.process_id = os.getpid()
        self.line = caller_line()
        """Where the script joined: its first call of a job, loader or the like."""
        self._up = up
        self._rank = mesh.rank
        self._said: set[str] = set()
        self._end_group = end_group
        self._left = False
        self._desync_detector = DesyncDetector(mesh, notify=self.notify) if mesh.size > 1 else None
        self._has_agent = config is not None
        self.world = World(
            mesh=replace(mesh, desync_detector=self._desync_detector),
            notify=self.notify,
            send_record=up,
            **({} if config is None else self._watched(config)),
            meter=ProgressMeter(rank=mesh.rank, record=up) if progress and mesh.rank == 0 else None,
        )
        self.saver = Saver(mesh=self.world.mesh)
        atexit.register(self.leave)

    def _watched(self, config: WorkerConfig) -> dict[str, Any]:
        """The parts of the world by which `rankless verify` and `rankless plan` look at a run."""
        watch, rank = config.observation, self._rank
        limit = watch.stop_after_steps
        inspected = None if config.recording is None else watch.inspected
        return {
            "recorder": None if config.recording is None else RunRecorder(config.recording, rank, survey=survey_script),
            "perturbation_seed": config.perturbation_seed,
            "dtype": None if config.dtype is None else getattr(torch, config.dtype),
            "limit": None if limit is None else StepLimit(limit, at_end=lambda: self._close(stopped=True)),
            "programs": None if watch.programs is None or rank != 0 else ProgramRecorder(watch.programs),
            "inspector": None
            if inspected is None
            else ValueInspector(ValueRecorder(str(config.recording), rank, inspected)),
        }

    def _close(self, *, stopped: bool) -> None:
        """Finish what is being recorded."""
        if self.world.recorder is not None:
            self.world.recorder.finish(stopped=stopped)
        if self.world.programs is not None:
            self.world.programs.finish(survey_script(()).jobs)

    def notify(self, text: str) -> None:
        """Tell the user something, once; the ranks say the same things, so rank 0 speaks for all."""
        if self._rank == 0 and text not in self._said:
            self._said.add(text)
            self._up(Notice(rank=0, time_ns=time.monotonic_ns(), text=text))

    def finish(self) -> None:
        """At the end of a script that did not fail: wait for a save in the background.

        Raises `RanksDiverged` if other ranks still wait for this one.
        ranks still wait for this one.
        """
        self.saver.join()
        if self._desync_detector is not None:
            rendezvous, self._desync_detector = self._desync_detector, None
            rendezvous.end()

    def leave(self) -> None:
        """Finish what is being recorded, tell of a save that failed, and destroy the group that joining made."""
        if os.getpid() != self.process_id or self._left:
            return
        self._left = True
        atexit.unregister(self.leave)  # or the interpreter would keep all this, and the store with it, to its end
        self.world.passes.warn_unfinished(self.notify)
        if not self._has_agent and not hasattr(sys, "last_value"):
            self._finish_or_fail()
        if (failure := self.saver.close()) is not None:
            print(f"rankless: {failure}", file=sys.stderr)
        self._close(stopped=False)
        if self._end_group is not None and dist.is_initialized():
            end_group, self._end_group = self._end_group, None
            end_group()

    def make_group(self) -> None:
        """Let the collectives of a process that is alone have a group, of one."""
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, missing in the stubs
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self._end_group = dist.destroy_process_group

    def _finish_or_fail(self) -> None:
        """As the interpreter ends: what is raised now would be printed and forgotten, with exit code 0."""
        try:
            self.finish()
        except RanklessError as error:
            print(f"rankless: {type(error).__name__}{error}", file=sys.stderr, flush=True)
            os._exit(1)


def join(
    *,
    observer: Callable[[], Observer],
    find_info: Callable[[], RendezvousInfo],
    parameters: RendezvousParameters | None = None,
    again: bool = False,
) -> ProcessContext:
    """Join the world that this process was started for or is invited to, or one of its own if it was started alone.

    `observer` makes what takes the records of a process that has no agent above it; `find_info` finds where the workers
    meet. `again`: it has joined before, and left. Raises JoinError if the ranks do not come together.
    """
    config = environment.read_worker_config()
    if config is not None:
        _require_as_planned(config, parameters)
        return _join_as_worker(config, find_info, again)
    if parameters is not None:
        return _join_invited(parameters, observer)
    horovod = environment.read_horovod_worker()
    if horovod is not None and horovod.world_size > 1 and not dist.is_initialized():
        return _join_by_info(find_info(), observer)
    torchrun = environment.read_torchrun()
    # A worker's forked child has inherited a group that is the worker's own, and must not touch it.
    may_join = not environment.is_child_of_worker()
    if may_join and (torchrun is not None or (dist.is_available() and dist.is_initialized())):
        return _join_existing(torchrun, observer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    up = observer()
    return ProcessContext(mesh=Mesh.solo(device), local_rank=0, up=up, config=None, progress=True, end_group=None)


def _require_as_planned(config: WorkerConfig, parameters: RendezvousParameters | None) -> None:
    if parameters is not None and (parameters.rank, parameters.world_size) != (config.rank, config.world_size):
        raise JoinError(
            expected=f"rank={config.rank} and world_size={config.world_size}, as `rankless run` started this process",
            found=f"rank={parameters.rank} and world_size={parameters.world_size} in rankless.init",
            fix="call rankless.init() without arguments under a launcher",
        )


def _join_as_worker(config: WorkerConfig, find_info: Callable[[], RendezvousInfo], again: bool) -> ProcessContext:
    if config.observation.is_reference:
        raise ConfigError(
            expected="a twin in plain PyTorch, so that it says what the script should do without Rankless",
            found="one that calls Rankless",
            fix="take rankless out of the script given as --against: zero_grad(), backward() and step() in its place",
        )
    device = _use_device(config.device)
    end_group = None
    if config.world_size > 1 and not dist.is_initialized():
        store = join_tcp_rendezvous(_invitation_of(config), print_notice).store if again else find_info().store
        end_group = _make_group(config.backend, device, store=store, rank=config.rank, world_size=config.world_size)
    descriptor = config.records_descriptor

    def up(record: AnyRecord) -> None:
        if descriptor is not None:
            send_record(record, descriptor=descriptor, blocking=isinstance(record, Notice))

    mesh = _mesh_of_world(device)
    context = ProcessContext(
        mesh=mesh,
        local_rank=config.local_rank,
        up=up,
        config=config,
        progress=config.progress,
        end_group=end_group,
    )
    if config.seed is None:
        _begin_alike(mesh, context)
    return context


def _join_invited(parameters: RendezvousParameters, observer: Callable[[], Observer]) -> ProcessContext:
    rendezvous = (
        join_tcp_rendezvous(parameters, print_notice)
        if parameters.kind == "tcp"
        else join_file_rendezvous(parameters, print_notice)
    )
    local_rank = rendezvous.local_rank(parameters.rank)
    device, backend = _device_of(local_rank)
    if rendezvous.is_on_one_host:
        environment.prefer_loopback()
    end_group = _make_group(
        backend, device, store=rendezvous.store, rank=parameters.rank, world_size=parameters.world_size
    )
    return _runtime_without_agent(device, local_rank, observer, end_group)


def _join_by_info(info: RendezvousInfo, observer: Callable[[], Observer]) -> ProcessContext:
    """Join the ranks of a place that Horovod's own launcher has told, any number of times."""
    local_rank = info.assignment.local_rank if info.assignment is not None else 0
    device, backend = _device_of(local_rank)
    time_joined = info.store.add(f"rankless/times/{info.rank}", 1)
    store = dist.PrefixStore(f"rankless/group/{time_joined}", info.store)  # type: ignore[attr-defined]  # not in the stubs
    end_group = _make_group(backend, device, store=store, rank=info.rank, world_size=info.size)
    return _runtime_without_agent(device, local_rank, observer, end_group)


def _make_group(backend: str, device: torch.device, *, store: Any, rank: int, world_size: int) -> Callable[[], None]:
    """Make the group of the world, and return what destroys it.

    Nobody comes back before all have made it: one whose script ends at once would be gone while others still connect to
    it. And rank 0, whose process serves the store, does not go before all know that. Raises JoinError if some have not
    made it in STORE_TIMEOUT.
    """
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound)
    store.add(JOINED, 1)
    come = _await_all(store, JOINED, world_size)
    if come < world_size:
        raise JoinError(
            expected=f"all {world_size} ranks to have made their group in {STORE_TIMEOUT.total_seconds():g} s",
            found=f"{come} that have",
            fix="look into the logs of the others: one hangs, or has gone, while it joins",
        )
    store.add(TOLD, 1)

    def end() -> None:
        if rank == 0:
            _await_all(store, TOLD, world_size)
        dist.destroy_process_group()

    return end


def _await_all(store: Any, name: str, world_size: int) -> int:
    """Wait until all ranks are counted under this name; returns how many are, fewer only after STORE_TIMEOUT."""
    start = told = time.monotonic()
    nap = 0.001
    while (come := int(store.add(name, 0))) < world_size:
        now = time.monotonic()
        if now - start > STORE_TIMEOUT.total_seconds():
            break
        if now - told > TELL_AFTER_SECONDS:
            told = now
            print_notice(f"{come} of {world_size} ranks have come through joining; waiting for the others")
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return come


def _join_existing(torchrun: environment.TorchrunWorker | None, observer: Callable[[], Observer]) -> ProcessContext:
    """Join as torchrun, or a launcher like it, has told; or take over the group that the script has made."""
    if torchrun is not None and torchrun.world_size > 1 and not dist.is_initialized():
        return _join_invited(parameters_from_torchrun(torchrun), observer)
    local_rank = torchrun.local_rank if torchrun is not None else 0
    device, _ = _device_of(local_rank)
    return _runtime_without_agent(device, local_rank, observer, None)


def _runtime_without_agent(
    device: torch.device, local_rank: int, observer: Callable[[], Observer], end_group: Callable[[], None] | None
) -> ProcessContext:
    mesh = _mesh_of_world(device)
    up = observer() if mesh.rank == 0 else _drop
    context = ProcessContext(mesh=mesh, local_rank=local_rank, up=up, config=None, progress=True, end_group=end_group)
    _begin_alike(mesh, context)
    return context


def _device_of(local_rank: int) -> tuple[torch.device, str]:
    """The GPU of this number with NCCL; the CPU with Gloo where there is none."""
    own_gpu = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    return _use_device(f"cuda:{local_rank}" if own_gpu else "cpu"), "nccl" if own_gpu else "gloo"


def _invitation_of(config: WorkerConfig) -> RendezvousParameters:
    """Where a worker joins that has left: rank 0's first store may still be closing."""
    return RendezvousParameters(
        kind="tcp",
        host=config.master_address,
        port=config.master_port,
        rank=config.rank,
        world_size=config.world_size,
        timeout_seconds=JOINING_SECONDS,
    )


def _begin_alike(mesh: Mesh, context: ProcessContext) -> None:
    """Have all generators go on from rank 0's seed, and say so, if they have begun apart."""
    if not _seeded_alike(mesh):
        context.notify(
            "the ranks' random generators started from different seeds; from here on all go on from rank 0's "
            "(models made before get rank 0's values at a job's first call)"
        )


def _seeded_alike(mesh: Mesh) -> bool:
    """Whether all ranks' generators began alike, as under `rankless run`; if not, they begin anew from rank 0's."""
    seeds = [int.from_bytes(data, "little") for data in all_gather_bytes(_seed_bytes(), mesh=mesh)]
    if len(set(seeds)) == 1:
        return True
    torch.manual_seed(seeds[0])
    random.seed(seeds[0])
    numpy.random.seed(seeds[0] % 2**32)
    return False


def _seed_bytes() -> bytes:
    return (torch.initial_seed() % 2**64).to_bytes(8, "little")


def _mesh_of_world(device: torch.device) -> Mesh:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh.solo(device)
    return Mesh(rank=dist.get_rank(), size=dist.get_world_size(), device=device, group=dist.group.WORLD)


def _use_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _drop(_record: AnyRecord) -> None:
    """For ranks whose records nobody reads."""
