"""What each worker of a run is told."""

import os
import socket

from rankless.launch.logs import log_files
from rankless.plan.check import choose_backend
from rankless.plan.environment import foreign_environment, user_visible_devices, worker_environment
from rankless.plan.run_plan import RunPlan, WorkerLaunch, WorkerPlan


def plan_workers(plan: RunPlan, *, folder: str, store: socket.socket, reserved: socket.socket) -> list[WorkerLaunch]:
    """Every worker's plan and environment, in the order of ranks."""
    seen, cuda_devices = _seen_devices(plan)
    foreign = plan.foreign
    launches = []
    for rank, device in enumerate(seen):
        log_file, error_log_file = (path and os.path.abspath(path) for path in log_files(plan, folder, rank))
        assert log_file is not None
        worker = WorkerPlan(
            rank=rank,
            world_size=plan.worker_count,
            local_rank=rank,
            local_world_size=plan.worker_count,
            device=device,
            threads=plan.threads_per_worker,
            backend=choose_backend(plan.devices),
            master_address=plan.hosts.master_address,
            master_port=reserved.getsockname()[1],
            run_id=(foreign and foreign.run_id) or os.path.basename(folder),
            seed=plan.seed,
            log_file=log_file,
            error_log_file=error_log_file,
            recording=plan.recording,
            perturbation_seed=plan.perturbation_seed,
            dtype=plan.dtype,
            watch=plan.watch,
            progress=plan.progress,
            store_descriptor=store.fileno() if rank == 0 else None,
            store_address=store.getsockname()[0],
            store_port=store.getsockname()[1],
        )
        environment = worker_environment(worker, cuda_devices=cuda_devices)
        if foreign is not None:
            environment |= foreign_environment(foreign, rank, folder=os.path.dirname(log_file))
        launches.append(WorkerLaunch(plan=worker, environment=environment))
    return launches


def _seen_devices(plan: RunPlan) -> tuple[list[str], str | None]:
    """Each worker's device as the worker numbers it, and the CUDA_VISIBLE_DEVICES of all, or None to leave it."""
    if plan.foreign is not None:
        # torchrun's workers see every GPU of the host, and choose by LOCAL_RANK.
        alone = plan.foreign.virtual_local_rank
        return ["cuda:0" if alone and device != "cpu" else device for device in plan.devices], None
    used = sorted({int(device.removeprefix("cuda:")) for device in plan.devices if device != "cpu"})
    visible = user_visible_devices()
    names = [visible[number] if visible is not None else str(number) for number in used]
    # Workers see the chosen GPUs only, numbered from 0, so that a script's use of LOCAL_RANK means them.
    seen = [
        device if device == "cpu" else f"cuda:{used.index(int(device.removeprefix('cuda:')))}"
        for device in plan.devices
    ]
    return seen, ",".join(names) if names else None
