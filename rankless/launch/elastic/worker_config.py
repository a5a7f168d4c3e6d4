"""What one worker of an elastic job is told when it is started: all but its rank, which each round gives it anew."""

import os

from rankless.config.environment import loopback_name, python_path_from, worker_environment
from rankless.config.horovodrun import elastic_variables
from rankless.config.run_config import JobStart, RunConfig
from rankless.config.worker_config import WorkerConfig, WorkerLaunch
from rankless.launch.elastic.member import ElasticWorker
from rankless.launch.log_files import log_files, make_pair
from rankless.runtime.hooks.import_aliases import AT_START


def launch_of(
    worker: ElasticWorker, config: RunConfig, start: JobStart, *, folder: str, interface: str | None
) -> WorkerLaunch:
    """The launch of a worker; its files are named by its number."""
    files = log_files(config, folder, worker.number, worker.slot)
    make_pair(files)
    log_file, error_log_file = (path and os.path.abspath(path) for path in files)
    assert log_file is not None
    told = WorkerConfig(
        rank=worker.number,
        world_size=max(config.worker_count, worker.number + 1),
        local_rank=worker.slot,
        local_world_size=worker.slot + 1,
        device=config.devices[worker.slot % len(config.devices)],
        threads=config.threads_per_worker,
        backend=start.backend,
        master_address=start.master_address,
        master_port=start.master_port,
        run_id=start.run_id,
        seed=start.seed,
        log_file=log_file,
        error_log_file=error_log_file,
        progress=config.progress,
        interface=interface,
    )
    environment = worker_environment(told, cuda_devices=None)
    environment["PYTHONPATH"] = python_path_from(AT_START)
    if config.horovod is not None:
        environment |= elastic_variables(
            config.horovod, host=worker.host, local_rank=worker.slot, interface=interface or loopback_name()
        )
    return WorkerLaunch(config=told, environment=environment)
