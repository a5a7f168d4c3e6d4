"""What each worker of a run is told."""

import os
from collections.abc import Sequence

from rankless.config.environment import (
    foreign_environment,
    loopback_name,
    python_path_from,
    user_visible_devices,
    worker_environment,
)
from rankless.config.fleetrun import Place, endpoint, fleet_variables
from rankless.config.horovodrun import rendezvous_variables, slot_variables
from rankless.config.run_config import JobStart, RunConfig
from rankless.config.worker_config import WorkerConfig, WorkerLaunch
from rankless.launch.job_setup import Assembled
from rankless.launch.log_files import log_files
from rankless.runtime.hooks.import_aliases import AT_START


def make_worker_configs(
    config: RunConfig, job: Assembled, *, folder: str, pages: Sequence[int] = ()
) -> list[WorkerLaunch]:
    """The plan and environment of every worker of this host, in the order of ranks; `pages` are their whereabouts."""
    seen, cuda_devices = _seen_devices(config)
    foreign, start = config.foreign, job.start
    launches = []
    for local_rank, device in enumerate(seen):
        rank = start.first_rank(job.place) + local_rank
        log_file, error_log_file = (
            path and os.path.abspath(path) for path in log_files(config, folder, rank, local_rank)
        )
        assert log_file is not None
        worker = WorkerConfig(
            rank=rank,
            world_size=start.world_size,
            local_rank=local_rank,
            local_world_size=len(seen),
            device=device,
            threads=config.threads_per_worker,
            backend=start.backend,
            master_address=start.master_address,
            master_port=start.master_port,
            run_id=(foreign and foreign.run_id) or start.run_id,
            seed=start.seed,
            log_file=log_file,
            error_log_file=error_log_file,
            recording=start.recording,
            perturbation_seed=start.perturbation_seed,
            dtype=start.dtype,
            observation=start.observation,
            progress=config.progress,
            interface=job.interface,
            host=job.place,
            host_count=len(start.workers),
            store_descriptor=job.store.fileno() if rank == 0 and job.store is not None else None,
            status_descriptor=pages[local_rank] if pages else None,
            store_address=start.store_address,
            store_port=start.store_port,
        )
        environment = worker_environment(worker, cuda_devices=cuda_devices)
        if foreign is None:  # torchrun's environment is its users' own, to the letter
            environment["PYTHONPATH"] = python_path_from(AT_START)
        else:
            environment |= foreign_environment(foreign, local_rank, folder=os.path.dirname(log_file))
        if config.fleet is not None:
            environment |= fleet_variables(config.fleet, _place(worker, start))
        if config.horovod is not None:
            environment |= rendezvous_variables(start.store_address, start.rendezvous_port)
            environment |= slot_variables(config.horovod, rank, interface=job.interface or loopback_name())
        launches.append(WorkerLaunch(config=worker, environment=environment))
    return launches


def _place(worker: WorkerConfig, start: JobStart) -> Place:
    return Place(
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.local_rank,
        local_size=worker.local_world_size,
        host_count=worker.host_count,
        master=endpoint(worker.master_address, worker.master_port),
        endpoints=start.endpoints,
        backend=start.backend,
        run_id=worker.run_id,
    )


def _seen_devices(config: RunConfig) -> tuple[list[str], str | None]:
    """Each worker's device as the worker numbers it, and the CUDA_VISIBLE_DEVICES of all, or None to leave it."""
    if config.foreign is not None or config.horovod is not None:
        # torchrun's and Horovod's workers see every GPU of the host, and choose by their local rank.
        alone = config.foreign is not None and config.foreign.virtual_local_rank
        return ["cuda:0" if alone and device != "cpu" else device for device in config.devices], None
    # In the order that was asked for: local rank 0's is the first that a script sees.
    used = list(dict.fromkeys(int(device.removeprefix("cuda:")) for device in config.devices if device != "cpu"))
    if config.fleet is not None:
        used = list(config.fleet.gpus)
    visible = user_visible_devices()
    names = [visible[number] if visible is not None else str(number) for number in used]
    # Workers see the chosen GPUs only, numbered from 0, so that a script's use of LOCAL_RANK means them.
    seen = [
        device if device == "cpu" else f"cuda:{used.index(int(device.removeprefix('cuda:')))}"
        for device in config.devices
    ]
    hidden = config.fleet is not None and config.fleet.hides_gpus
    return seen, ",".join(names) if names or hidden else None
