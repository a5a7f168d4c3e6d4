"""`rankless run`: run a script on one or more workers, on this host or on several."""

import argparse
import importlib
import sys

from rankless.cli.extension_options import add_own_options, find_given_options
from rankless.cli.host_options import LOG_FOLDER_HELP, add_host_options, keep_spares, make_cluster, read_workers
from rankless.cli.json_output import add_json_option, make_json_header, read_json_destination
from rankless.cli.shared_run_options import (
    PLAN_HELP,
    add_backend_option,
    add_copies_option,
    add_program_options,
    add_view_options,
    count_default_workers,
    find_misplaced_count,
    read_plan_file,
    read_program,
)
from rankless.config import environment
from rankless.config.cluster_variables import expand_hosts, read_cluster_worker, read_node_count
from rankless.config.environment import default_log_folder
from rankless.config.hosts_and_addresses import Host
from rankless.config.make_run_config import count_gpus, make_run_config
from rankless.config.meaning_of_extension_options import read_options
from rankless.config.mesh_option import MESH_HELP, parse_mesh
from rankless.config.run_config import Cluster, RunConfig, RunRequest
from rankless.errors import ConfigError
from rankless.launch import agent
from rankless.records.run_json_format import RunSummary
from rankless.terminal.lazy_progress_display import ProgressObserver

NAME = "run"
TAKES_EXTENSION_OPTIONS = True
JSON_CONTENT = RunSummary
HELP = (
    "Run a script on one or more workers, one per device, on this host or on several. "
    "Several workers have no standard input, so input() raises EOFError; see --debug-rank."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "-n",
        dest="workers",
        type=int,
        metavar="N",
        help="Workers on each host. Default: those of --mesh or --plan, else 1.",
    )
    parser.add_argument("--mesh", type=parse_mesh, default=(), metavar="data=2,pipeline=2", help=MESH_HELP)
    parser.add_argument(
        "--devices", metavar="0,1|cpu", help="GPUs to use, or cpu. Default: GPUs if the host has any, else cpu."
    )
    add_backend_option(parser)
    parser.add_argument("--threads", type=int, metavar="K", help="CPU threads per worker. Default: cores / workers.")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="Seed of the random numbers of all workers. Default: random."
    )
    parser.add_argument(
        "--show",
        choices=("first", "all"),
        default="first",
        help="Workers whose output to show: the first or all. Default: first.",
    )
    add_view_options(parser)
    _add_start_options(parser)
    _add_failure_options(parser)
    add_own_options(parser)
    add_host_options(parser)
    add_program_options(parser)


def _add_start_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how workers start, how they end, and what is shown."""
    parser.add_argument("--log-dir", default=default_log_folder(), metavar="DIR", help=LOG_FOLDER_HELP)
    add_json_option(parser, "the summary of the run")
    parser.add_argument(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="Seconds without progress after which a hung job ends; 0 for never. Default: from the time of its steps.",
    )
    parser.add_argument(
        "--debug-rank",
        type=int,
        metavar="R",
        help="Give rank R the terminal, for pdb, breakpoint() and torch.distributed.breakpoint. No rank times out "
        "then.",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        metavar="S",
        help="Seconds that the workers have to end, and to save, after SIGTERM or Ctrl-C to rankless; a second signal "
        "ends them at once. Default: 30; in Slurm and Kubernetes 5 less than they give.",
    )
    parser.add_argument(
        "--no-warm",
        action="store_true",
        help="Start plain processes, each of which imports torch, instead of using a fork server.",
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="Module that the fork server imports once, so that no worker imports it again, for example transformers. "
        "Repeat the option, or separate modules by commas. RANKLESS_PRELOAD adds others.",
    )
    _add_output_options(parser)
    parser.add_argument("--plan", metavar="FILE", help=PLAN_HELP)


def _add_failure_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what happens when a worker fails."""
    parser.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="How few workers may be left after others were killed. A run of jobs on CPUs continues without them, as "
        "the same training. Default: 1, and one of each kind.",
    )
    parser.add_argument(
        "--no-replace",
        action="store_true",
        help="Continue with fewer workers, instead of replacing a killed one by a copy of another one of its host.",
    )
    add_copies_option(parser)
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="The last N of the hosts wait, and take the places of lost ones: the run saves, and starts again from its "
        "checkpoint. Default: 0.",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="How often to start the script again after a failure; it finds its newest checkpoint by itself. Default: "
        "0.",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the terminal shows besides the script's output."""
    parser.add_argument(
        "--no-progress",
        action="store_true",
        help="Show no progress line of jobs, for a script that shows its own or for logs.",
    )
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="Show only the output of the script and, if the run fails, why: no table, progress line or summary.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    config, destination = _make_config(arguments), read_json_destination(arguments)
    summaries: list[RunSummary] = []
    codes: list[int] = []
    try:
        with destination.reserve_standard_output(), ProgressObserver() as progress:

            def run_once(config: RunConfig, observer: agent.AttemptObserver | None) -> RunSummary | None:
                summaries.clear()
                context = agent.AgentContext(
                    cursor=progress.cursor, observer=observer or agent.NoObserver(), on_summary=summaries.append
                )
                codes.append(
                    agent.run(
                        config,
                        on_record=progress.receive,
                        out=sys.stdout,
                        err=sys.stderr,
                        hide_progress=progress.hidden,
                        context=context,
                    )
                )
                return next(iter(summaries), None)

            def notify(text: str) -> None:
                with progress.hidden():
                    print(f"rankless: {text}", file=sys.stderr, flush=True)

            if config.may_start_again:
                # Imported here: most runs start once.
                restarts = importlib.import_module("rankless.launch.recovery.run_restarts")
                restarts.run_with_restarts(config, run_once, notify=notify)
            else:
                run_once(config, None)
            return codes[-1]
    finally:
        for summary in summaries:
            destination.write(make_json_header(NAME, config.program, seed=config.seed), summary)


def _make_config(arguments: argparse.Namespace) -> RunConfig:
    program = read_program(arguments)
    given = find_given_options(arguments)
    options, requested = read_options(given, NAME), read_workers(arguments, given)
    arguments.workers = requested.worker_count
    hint = find_misplaced_count(program) if arguments.workers is None else None
    if hint is not None:
        print(f"rankless: {hint}", file=sys.stderr)
    cluster, mesh = make_cluster(arguments, requested.hosts, heterogeneous=requested.heterogeneous), arguments.mesh
    cluster = keep_spares(cluster or make_slurm_cluster(arguments), arguments.spares)
    workers = arguments.workers
    if workers is None:
        workers = 1 if cluster is not None else count_default_workers(arguments, otherwise=1)
    workers += requested.heterogeneous
    total = workers if cluster is None else cluster.workers
    return make_run_config(
        program,
        RunRequest(
            worker_count=workers,
            plan=read_plan_file(arguments, program, workers=total),
            mesh=mesh,
            devices=arguments.devices,
            backend=arguments.backend,
            threads=arguments.threads,
            seed=arguments.seed,
            log_folder=arguments.log_dir,
            show=arguments.show,
            warm=not arguments.no_warm,
            preload=tuple(arguments.preload),
            view=arguments.view,
            zero=arguments.zero,
            progress=not (arguments.no_progress or arguments.quiet or arguments.debug_rank is not None),
            agent_output="quiet" if arguments.quiet else "summary",
            command=("rankless", NAME, *arguments.command_line),
            cluster=cluster,
            hang_timeout_seconds=arguments.hang_timeout,
            min_workers=arguments.min_workers,
            replaces_workers=not arguments.no_replace,
            copies=arguments.copies,
            restarts=arguments.restarts,
            grace_seconds=arguments.grace_seconds,
            debug_rank=arguments.debug_rank,
            heterogeneous_workers=requested.heterogeneous,
            options=options,
        ),
    )


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
    visible = environment.user_visible_devices()
    if shares_node and visible and not environment.has_own_gpu():
        # All tasks of the node see all its GPUs: this one shall see its own.
        environment.apply({"CUDA_VISIBLE_DEVICES": visible[task.local_rank % len(visible)]})
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
        copies=arguments.send_script,
    )
