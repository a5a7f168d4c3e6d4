"""The configuration of every worker: the one place that makes a `WorkerConfig`, elastic jobs included."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankless.config.environment import worker_environment
from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.config.run_config import AgreedJobConfig, RunConfig
from rankless.launch.extension_process_role import WorkerContent
from rankless.launch.launcher_profile import LauncherProfile, make_log_files
from rankless.launch.prepare_run import ReadyJob

_NO_CONTENT = WorkerContent()
_AGREED = (
    *("backend", "master_address", "master_port", "run_id", "seed", "recording", "perturbation_seed", "dtype", "plan"),
    *("mesh", "observation", "is_logical", "zero", "replaces_workers", "hosts_of_copies", "store_address"),
)
"""What all workers of all hosts have alike, under one name in both configurations."""


@dataclass(frozen=True, kw_only=True)
class ElasticSlot:
    """A worker of an elastic job where it starts: its rank changes from round to round, its number does not."""

    number: int
    host: str
    slot: int
    """The smallest number that no other living worker of its host has."""
    store_token: str
    """What the store of the job's rounds asks for."""


class WorkerDescriptors(NamedTuple):
    """Descriptors that the workers of a host inherit.

    Args:
        pages: That of each worker's status page; empty for none.
        channels: That of each worker's end of the channel for rounds; empty for none.
        terminal: Those that one worker gets of the agent's standard input, output and error; empty for none.
    """

    pages: Sequence[int] = ()
    channels: Sequence[int] = ()
    terminal: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Where a worker is, and what else the agreed configuration of its job does not have."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    host_index: int = 0
    interface: str | None = None
    store_token: str = ""
    status_descriptor: int | None = None
    recovery_descriptor: int | None = None
    content: WorkerContent = _NO_CONTENT
    terminal: Sequence[int] = ()
    cuda_devices: str | None = None
    """Its CUDA_VISIBLE_DEVICES; None leaves that unchanged."""
    elastic_host: str | None = None
    """The name of its host in an elastic job."""


_NO_DESCRIPTORS = WorkerDescriptors()


def make_worker_configs(
    config: RunConfig,
    job: ReadyJob,
    *,
    folder: str,
    descriptors: WorkerDescriptors = _NO_DESCRIPTORS,
    content: WorkerContent = _NO_CONTENT,
) -> list[WorkerLaunch]:
    """Return the configuration and environment of every worker of this host, in the order of their ranks.

    `content` is what the roles of the run give the workers.
    """
    pages, channels = descriptors.pages, descriptors.channels
    visible = show_devices(config, job)
    first = job.start.first_rank(job.host_index)
    return [
        _make_launch(
            config,
            job.profile,
            job.start,
            _Position(
                rank=first + local_rank,
                world_size=job.start.world_size,
                local_rank=local_rank,
                local_world_size=len(visible),
                device=device,
                host_index=job.host_index,
                interface=job.interface,
                store_token=job.store_token,
                status_descriptor=pages[local_rank] if pages else None,
                recovery_descriptor=channels[local_rank] if channels else None,
                content=content,
                terminal=descriptors.terminal if first + local_rank == (config.debug_rank or 0) else (),
                cuda_devices="" if device == "cpu" and cuda_variable else cuda_variable,
            ),
            folder=folder,
        )
        for local_rank, (device, cuda_variable) in enumerate(visible)
    ]


def show_devices(config: RunConfig, job: ReadyJob) -> list[tuple[str, str | None]]:
    """Return each worker's device, and its CUDA_VISIBLE_DEVICES; None leaves that unchanged."""
    if job.start.is_logical:  # the script sees one device
        alone = [job.profile.visible_devices([device]) for device in config.devices]
        return [(visible.names[0], visible.cuda_variable) for visible in alone]
    visible = job.profile.visible_devices(config.devices)
    return [(name, visible.cuda_variable) for name in visible.names]


def make_elastic_worker(
    config: RunConfig,
    profile: LauncherProfile,
    start: AgreedJobConfig,
    worker: ElasticSlot,
    *,
    folder: str,
    interface: str | None,
) -> WorkerLaunch:
    """Return the configuration and environment of a worker of an elastic job, and make its log files.

    Its number stands for its rank, which each round assigns anew.
    """
    position = _Position(
        rank=worker.number,
        world_size=max(config.worker_count, worker.number + 1),
        local_rank=worker.slot,
        local_world_size=worker.slot + 1,
        device=config.devices[worker.slot % len(config.devices)],
        interface=interface,
        store_token=worker.store_token,
        elastic_host=worker.host,
    )
    make_log_files(profile, profile.log_files(folder, worker.number, worker.slot))
    return _make_launch(config, profile, start, position, folder=folder)


def _absolute(path: str) -> str:
    """Return an absolute path, or the relative one if the current folder's name is not UTF-8, as messages are."""
    absolute = os.path.abspath(path)
    return absolute if os.fsencode(absolute) == absolute.encode(errors="replace") else path


def _make_launch(
    config: RunConfig,
    profile: LauncherProfile,
    start: AgreedJobConfig,
    position: _Position,
    *,
    folder: str,
) -> WorkerLaunch:
    files = profile.log_files(folder, position.rank, position.local_rank)
    worker = WorkerConfig(
        rank=position.rank,
        world_size=position.world_size,
        local_rank=position.local_rank,
        local_world_size=position.local_world_size,
        device=position.device,
        threads=config.threads_per_worker,
        log_file=_absolute(files.output),
        error_log_file=files.error and _absolute(files.error),
        progress=config.request.progress,
        interface=position.interface,
        host=position.host_index,
        host_count=start.worker_host_count,
        status_descriptor=position.status_descriptor,
        recovery_descriptor=position.recovery_descriptor,
        store_port=start.store_port or None,
        store_token=position.store_token,
        roles=position.content.roles,
        options=config.request.options,
        inherited=tuple(position.content.descriptors),
        terminal=tuple(position.terminal),
        is_debugged=config.debug_rank is not None,
        **{name: getattr(start, name) for name in _AGREED},
    )
    own = profile.worker_environment(worker, start, elastic_host=position.elastic_host)
    common = worker_environment(worker, cuda_devices=position.cuda_devices)
    return WorkerLaunch(config=worker, environment={**common, **start.launcher_variables, **own})
