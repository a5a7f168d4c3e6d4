"""What one worker of an elastic job is told when it is started: all but its rank, which each round gives it anew."""

import os

from rankless.launch.elastic.workers import Worker
from rankless.launch.logs import log_files, make_pair
from rankless.plan.environment import loopback_name, python_path_from, worker_environment
from rankless.plan.horovod import elastic_variables
from rankless.plan.run_plan import JobStart, RunPlan, WorkerLaunch, WorkerPlan
from rankless.runtime.import_names import AT_START


def launch_of(worker: Worker, plan: RunPlan, start: JobStart, *, folder: str, interface: str | None) -> WorkerLaunch:
    """The launch of a worker; its files are named by its number."""
    files = log_files(plan, folder, worker.number, worker.slot)
    make_pair(files)
    log_file, error_log_file = (path and os.path.abspath(path) for path in files)
    assert log_file is not None
    told = WorkerPlan(
        rank=worker.number,
        world_size=max(plan.worker_count, worker.number + 1),
        local_rank=worker.slot,
        local_world_size=worker.slot + 1,
        device=plan.devices[worker.slot % len(plan.devices)],
        threads=plan.threads_per_worker,
        backend=start.backend,
        master_address=start.master_address,
        master_port=start.master_port,
        run_id=start.run_id,
        seed=start.seed,
        log_file=log_file,
        error_log_file=error_log_file,
        progress=plan.progress,
        interface=interface,
    )
    environment = worker_environment(told, cuda_devices=None)
    environment["PYTHONPATH"] = python_path_from(AT_START)
    if plan.horovod is not None:
        environment |= elastic_variables(
            plan.horovod, host=worker.host, local_rank=worker.slot, interface=interface or loopback_name()
        )
    return WorkerLaunch(plan=told, environment=environment)
