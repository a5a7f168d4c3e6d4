"""What each worker of a run is told, and the two ports they need."""

import os
import socket

from rankless.launch.logs import log_file
from rankless.plan.check import choose_backend
from rankless.plan.environment import user_visible_devices, worker_environment
from rankless.plan.run_plan import RunPlan, WorkerLaunch, WorkerPlan

_ADDRESS = "127.0.0.1"


def open_store_socket() -> socket.socket:
    """A socket that listens on this host only, for the store of our group, which rank 0 will serve.

    It listens already, so ranks that come before rank 0 wait in its queue instead of trying again.
    """
    store = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    store.bind((_ADDRESS, 0))
    store.listen(1024)
    return store


def reserve_master_port() -> socket.socket:
    """A socket that keeps MASTER_PORT from everybody but a script that makes its own group with it.

    It is bound and does not listen, so the system gives the number to nobody else, while one socket that
    also sets SO_REUSEADDR, as torch's store does, may listen on it.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def plan_workers(plan: RunPlan, *, folder: str, store: socket.socket, reserved: socket.socket) -> list[WorkerLaunch]:
    """Every worker's plan and environment, in the order of ranks."""
    used = sorted({int(device.removeprefix("cuda:")) for device in plan.devices if device != "cpu"})
    visible = user_visible_devices()
    names = [visible[number] if visible is not None else str(number) for number in used]
    launches = []
    for rank, device in enumerate(plan.devices):
        # Workers see the chosen GPUs only, numbered from 0, so that a script's use of LOCAL_RANK means them.
        seen = device if device == "cpu" else f"cuda:{used.index(int(device.removeprefix('cuda:')))}"
        worker = WorkerPlan(
            rank=rank,
            world_size=plan.worker_count,
            local_rank=rank,
            local_world_size=plan.worker_count,
            device=seen,
            threads=plan.threads_per_worker,
            backend=choose_backend(plan.devices),
            master_address=_ADDRESS,
            master_port=reserved.getsockname()[1],
            run_id=os.path.basename(folder),
            seed=plan.seed,
            log_file=os.path.abspath(log_file(folder, rank)),
            recording=plan.recording,
            perturbation_seed=plan.perturbation_seed,
            dtype=plan.dtype,
            watch=plan.watch,
            progress=plan.progress,
            store_descriptor=store.fileno() if rank == 0 else None,
            store_port=store.getsockname()[1],
        )
        environment = worker_environment(worker, cuda_devices=",".join(names) if names else None)
        launches.append(WorkerLaunch(plan=worker, environment=environment))
    return launches
