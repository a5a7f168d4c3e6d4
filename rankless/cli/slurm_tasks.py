"""`rankless run` as a task of Slurm's `srun`: the agents of all tasks are the hosts of one run."""

import argparse

from rankless.config import environment
from rankless.config.cluster_variables import expand_hosts, read_cluster_worker, read_node_count
from rankless.config.hosts import Host
from rankless.config.run_config import Cluster
from rankless.config.validation import count_gpus
from rankless.errors import ConfigError


def make_slurm_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the tasks of the step of `srun` to which this process belongs; None outside a step of several tasks.

    With one task for each node, each agent starts `-n` workers, or one for each GPU. With more, each agent starts one
    worker, because Slurm divides the cores and GPUs of a node among its tasks.

    Raises:
        ConfigError: If the number of workers contradicts the tasks, or Slurm does not say where they run.
    """
    variables = environment.snapshot()
    task = read_cluster_worker(variables)
    if task is None or task.launcher != "srun" or environment.WORKER_PLAN in variables:
        return None
    if task.address is None or task.port == 0:
        raise ConfigError(
            expected="the job's number and nodes in Slurm's variables, since srun has started several tasks",
            found="no SLURM_JOB_ID" if task.port == 0 else "no SLURM_STEP_NODELIST and no SLURM_JOB_NODELIST",
            fix="name the hosts: --host-rank, --master and --host-count, or --hosts with --no-ssh",
        )
    nodes = read_node_count(variables)
    shares_node = nodes is None or nodes < task.world_size
    workers = arguments.workers
    if shares_node and workers is not None:
        raise ConfigError(
            expected=f"one worker for each task: srun has started {task.world_size} tasks on {nodes or 'some'} nodes",
            found=f"-n {workers}",
            fix="omit -n; or start one task for each node with srun --ntasks-per-node=1, and give it -n",
        )
    if workers is None:
        workers = 1 if shares_node else max(1, count_gpus())
    if shares_node:
        _show_one_gpu(task.local_rank)
    names = [] if shares_node else expand_hosts(variables.get("SLURM_STEP_NODELIST", ""))
    if len(names) != task.world_size:
        names = [f"task {number} of srun" for number in range(task.world_size)]
    return Cluster(
        hosts=tuple(Host(address=name, workers=workers) for name in (task.address, *names[1:])),
        host_index=task.rank,
        port=task.port,
        agent_start="slurm",
        is_listed=False,
        insecure=arguments.insecure,
        join_timeout_seconds=arguments.join_timeout,
        copies=arguments.copy,
    )


def _show_one_gpu(local_rank: int) -> None:
    """Let this process see one of the GPUs that all tasks of its node see, unless Slurm gives each task its own."""
    visible = environment.user_visible_devices()
    if visible and not environment.has_own_gpu():
        environment.apply({"CUDA_VISIBLE_DEVICES": visible[local_rank % len(visible)]})
