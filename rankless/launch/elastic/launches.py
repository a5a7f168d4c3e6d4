"""What one worker of an elastic job is told when it is started: all but its rank, which each round gives it anew."""

import os

from rankless.launch.elastic.roll import Worker
from rankless.launch.logs import log_files
from rankless.plan.environment import worker_environment
from rankless.plan.run_plan import JobStart, RunPlan, WorkerLaunch, WorkerPlan


def launch_of(worker: Worker, plan: RunPlan, start: JobStart, *, folder: str, interface: str | None) -> WorkerLaunch:
    """The launch of a worker; its files are named by its number."""
    log_file, error_log_file = (
        path and os.path.abspath(path) for path in log_files(plan, folder, worker.number, worker.slot)
    )
    assert log_file is not None
    os.makedirs(os.path.dirname(log_file), exist_ok=True)
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
    environment |= {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": worker.host}
    return WorkerLaunch(plan=told, environment=environment)
