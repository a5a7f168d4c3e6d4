"""All checks of a request, before any process starts."""

import glob
import importlib.util
import os
import re
import secrets
import shutil

import msgspec

from rankless.config.available_cpu_and_memory import core_count
from rankless.config.backend_and_fault_tolerance import (
    read_requested_backend,
    require_copies,
    require_enough_workers,
    require_usable_backend,
)
from rankless.config.cluster_variables import choose_grace
from rankless.config.environment import snapshot, user_hang_timeout, user_preload, user_threads, user_visible_devices
from rankless.config.extensions import find_extension
from rankless.config.meaning_of_extension_options import check_options, count_processes
from rankless.config.mesh_option import format_mesh, make_heterogeneous_mesh, require_workers
from rankless.config.program_source_files import names_rankless
from rankless.config.rank_awareness import decide_view, read_zero
from rankless.config.run_config import Cluster, PlanFile, Program, RunConfig, RunRequest, ScriptView, check_elastic
from rankless.errors import ConfigError
from rankless.records.parallel_plan import PlannedAxis, ZeroLevel


def make_run_config(program: Program, request: RunRequest) -> RunConfig:
    """Return the `RunConfig` of a request. Raises `ConfigError` for a request that cannot run."""
    request, cluster = read_cluster(request)
    threads, seed, count = request.threads, request.seed, request.worker_count
    has_workers = count > 0 or cluster is None
    if count < has_workers:
        raise ConfigError(expected="at least 1 worker", found=count, fix="give -n a number from 1 up")
    check_numbers(request)
    check_log_folder(request.log_folder)
    check_options(request, cluster)
    if has_workers:  # a host without workers does not run the program
        check_program(program)
    mesh = choose_run_mesh(request, cluster)
    devices = choose_worker_devices(request, count, has_kinds=any(axis.stage_workers for axis in mesh))
    backend = read_requested_backend(request.backend)
    require_usable_backend(backend, devices, host_count=1 if cluster is None else cluster.worker_host_count)
    view = choose_view(program, request, mesh, workers=count if cluster is None else cluster.workers)
    # Processes of other programs seed themselves. A program that names Rankless expects one seed for all ranks.
    expects_one_seed = view.is_logical or names_rankless(program)
    has_separate_seeds = request.recording is None and (request.separate_seeds or not expects_one_seed)
    config = RunConfig(
        program=program,
        worker_count=count,
        devices=devices,
        backend=backend,
        threads_per_worker=threads or user_threads() or share_cores(count, count_processes(request, cluster)),
        preload=choose_preload(program, request) if has_workers else (),
        seed=seed if seed is not None else None if has_separate_seeds else secrets.randbelow(2**32),
        mesh=mesh,
        cluster=cluster,
        hang_timeout_seconds=hang_timeout(request),
        debug_rank=choose_debug_rank(request, cluster),
        grace_seconds=choose_grace(request.grace_seconds, snapshot()),
        view=view,
        request=request,
        roles=list_roles(request),
    )
    require_enough_workers(config)
    require_copies(config)
    return config


def choose_view(program: Program, request: RunRequest, mesh: tuple[PlannedAxis, ...], *, workers: int) -> ScriptView:
    """Return how the workers run the program. Raises `ConfigError` if the user asks for a view that it cannot have."""
    view, conflict = ScriptView(), _find_view_conflict(program, request, mesh)
    if workers > 1 and request.view == "logical":
        if conflict is not None:
            raise ConfigError(
                expected="--logical with a Python program, whose workers all divide batches",
                found=conflict,
                fix="omit it, or omit --logical",
            )
        view = ScriptView(is_logical=True)
    elif workers > 1 and request.view == "auto" and conflict is None:
        view = decide_view(program)
    if request.zero is None:
        return view
    return view._replace(zero=_choose_zero(request, view, conflict, workers=workers))


def _choose_zero(request: RunRequest, view: ScriptView, conflict: str | None, *, workers: int) -> ZeroLevel | None:
    """Return what `--zero` shards; None on one worker. Raises `ConfigError` if the run cannot shard it."""
    level = read_zero(str(request.zero))
    if workers > 1 and not view.is_logical:
        reason = "--separate" if request.view == "separate" else conflict or view.reason
        raise ConfigError(
            expected="--zero with a script that knows no ranks, whose workers all divide batches",
            found=reason or "a script that knows ranks",
            fix="omit --zero; a job takes @rankless.job(zero=...), and --logical lets a script see one process",
        )
    return level if workers > 1 else None


def _find_view_conflict(program: Program, request: RunRequest, mesh: tuple[PlannedAxis, ...]) -> str | None:
    """Return what a run has that the logical view does not go with, if it has any."""
    if program.kind == "command":
        return f"the command {program.target}"
    roles = list_roles(request)
    if roles or request.heterogeneous_workers or request.elastic is not None:
        return f"options of {roles[0]}" if roles else "workers that join, or of several kinds"
    others = [axis.name for axis in mesh if axis.role != "data" and axis.size > 1]
    return f"a mesh with the axis {others[0]}" if others else None


def read_cluster(request: RunRequest) -> tuple[RunRequest, Cluster | None]:
    """Return a request with the numbers of workers of this host, and the hosts if there are several.

    Raises `ConfigError` for an elastic job that cannot run.
    """
    cluster = request.cluster
    if request.elastic is not None:
        # Hosts join and leave, and the driver makes what one host needs when it starts workers there.
        check_elastic(request.elastic, request.worker_count)
        return request, None
    if cluster is None:
        return request, None
    host = cluster.hosts[cluster.host_index]
    request = msgspec.structs.replace(request, worker_count=host.workers, heterogeneous_workers=host.heterogeneous)
    return request, cluster if len(cluster.hosts) > 1 else None


def check_numbers(request: RunRequest) -> None:
    """Raise `ConfigError` for numbers that no run can have."""
    threads, seed, steps = request.threads, request.seed, request.observation.stop_after_steps
    if threads is not None and threads < 1:
        raise ConfigError(expected="at least 1 thread per worker", found=threads, fix="give --threads 1 or more")
    if steps is not None and steps < 1:
        raise ConfigError(expected="at least 1 training step", found=steps, fix="give --steps a number from 1 up")
    if request.restarts < 0:
        raise ConfigError(expected="--restarts from 0 up", found=request.restarts, fix="give the number of restarts")
    if request.restarts and request.cluster is not None and request.cluster.agent_start != "ssh":
        raise ConfigError(
            expected="--restarts on one host, or on hosts that host 0 starts by ssh",
            found=f"--restarts {request.restarts} with a command on each host",
            fix="omit --restarts, and let the cluster start the job again, as with sbatch --requeue",
        )
    if request.cluster is not None and request.cluster.spares and (list_roles(request) or not request.replaces_workers):
        raise ConfigError(
            expected="--spares with processes of workers alone, and without --no-replace",
            found=f"options of {', '.join(list_roles(request))}" if list_roles(request) else "--no-replace",
            fix="omit one of them",
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(expected="a seed from 0 to 2**63 - 1", found=seed, fix="choose another --seed")


def list_roles(request: RunRequest) -> tuple[str, ...]:
    """Return the extensions whose processes the run has beside its workers."""
    given = [find_extension(name) for name in request.options]
    return tuple(each.name for each in given if each is not None and each.role is not None)


def share_cores(worker_count: int, process_count: int) -> int:
    """Return the threads of each worker: its share of the cores.

    Each of the `process_count` processes beside the workers keeps one core, if all workers have one then.
    """
    cores = core_count()
    left = cores - process_count
    return max(1, (left if left >= worker_count else cores) // max(1, worker_count))


def choose_run_mesh(request: RunRequest, cluster: Cluster | None) -> tuple[PlannedAxis, ...]:
    """Return the axes of the mesh of a run. Raises `ConfigError` for one that it cannot have."""
    workers = request.worker_count if cluster is None else cluster.workers
    check_heterogeneous(request, cluster)
    if not count_heterogeneous(request, cluster):
        return choose_mesh(request.mesh, request.plan, workers)
    if cluster is None:
        return make_heterogeneous_mesh([(workers, request.heterogeneous_workers)])
    return make_heterogeneous_mesh([(host.workers, host.heterogeneous) for host in cluster.hosts])


def count_heterogeneous(request: RunRequest, cluster: Cluster | None) -> int:
    """Return the number of heterogeneous workers of all hosts."""
    return request.heterogeneous_workers if cluster is None else cluster.heterogeneous_workers


def check_heterogeneous(request: RunRequest, cluster: Cluster | None) -> None:
    """Raise `ConfigError` for heterogeneous workers that no run can have."""
    count = count_heterogeneous(request, cluster)
    if not count:
        return
    other, workers = _find_conflict(request), request.worker_count if cluster is None else cluster.workers
    if count < 0 or count >= workers:
        raise ConfigError(
            expected="workers and heterogeneous workers, at least 1 of each",
            found=f"{workers - count} and {count}",
            fix="give --workers and --heter-workers numbers from 1 up",
        )
    if other is not None:
        raise ConfigError(
            expected="heterogeneous workers in the mode sync, without --mesh and --plan",
            found=other,
            fix="omit it, or omit --heter-workers",
        )


def _find_conflict(request: RunRequest) -> str | None:
    """Return what a request has that heterogeneous workers do not go with, if it has any."""
    if request.mesh or request.plan is not None:
        return "--mesh" if request.mesh else "--plan"
    return "an elastic job" if request.elastic is not None else None


def choose_mesh(mesh: tuple[PlannedAxis, ...], plan: PlanFile | None, workers: int) -> tuple[PlannedAxis, ...]:
    """Return the axes of the mesh of a run: those that are given, or those of its plan.

    Raises `ConfigError` if there are both and they differ, or if they are for another number of workers.
    """
    planned = () if plan is None else plan.axes
    if mesh and planned and mesh != planned:
        raise ConfigError(
            expected=f"the mesh of the plan: {format_mesh(planned)}",
            found=f"--mesh {format_mesh(mesh)}",
            fix="omit --mesh, or make a plan for this mesh with `rankless plan --mesh … --save`",
        )
    require_workers(mesh or planned, workers)
    return mesh or planned


def choose_preload(program: Program, request: RunRequest) -> tuple[str, ...]:
    """Return the modules that the fork server imports: the request's and those of RANKLESS_PRELOAD.

    Raises `ConfigError` for a module that does not exist, and for a request without a fork server.
    """
    if not request.warm or program.kind == "command":
        if request.preload:
            raise ConfigError(
                expected="--preload with a fork server, from which the workers are forked",
                found="plain processes, each of which imports its modules itself",
                fix="omit --preload, or --no-warm",
            )
        return ()
    names = [name.strip() for text in (*request.preload, user_preload()) for name in text.split(",")]
    wanted = tuple(dict.fromkeys(filter(None, names)))
    folder = os.path.dirname(os.path.realpath(program.target)) if program.kind == "script" else os.getcwd()
    for name in wanted:
        parts = name.split(".")
        if not all(part.isidentifier() for part in parts) or not _module_may_exist(parts[0], folder):
            raise ConfigError(
                expected="names of modules to preload, as transformers,datasets",
                found=f"no module {name} beside the program or among the installed packages",
                fix="correct --preload (RANKLESS_PRELOAD), or install the package",
            )
    return wanted


def hang_timeout(request: RunRequest) -> float | None:
    """Return the seconds without progress after which a job ends: the option's, or RANKLESS_HANG_TIMEOUT's.

    Raises `ConfigError` for a value that is no such number.
    """
    seconds, given = request.hang_timeout_seconds, user_hang_timeout()
    if request.debug_rank is not None:
        return 0.0  # a rank at a breakpoint makes no progress, and the others wait for it
    if seconds is None and given is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ConfigError(
            expected="seconds without progress after which a job is ended, or 0 for never",
            found=seconds if request.hang_timeout_seconds is not None else f"RANKLESS_HANG_TIMEOUT={given}",
            fix="give --hang-timeout a number from 0 up, or omit it: Rankless then learns it from the job's steps",
        )
    return seconds


def require_utf8(text: str, *, expected: str, fix: str) -> None:
    """Raise `ConfigError` for a text of the command line that is not UTF-8: messages between processes are."""
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(expected=expected, found=ascii(text), fix=fix)


def check_log_folder(folder: str) -> None:
    """Raise `ConfigError` for a log folder of which messages could not hold the name."""
    require_utf8(
        folder,
        expected="a log folder whose name is text in UTF-8",
        fix="choose another with --log-dir (RANKLESS_LOG_DIR)",
    )


def choose_debug_rank(request: RunRequest, cluster: Cluster | None) -> int | None:
    """Return the rank that gets the terminal. Raises `ConfigError` for a rank that this host does not have."""
    rank = request.debug_rank
    first = 0 if cluster is None else cluster.host_index
    if rank is not None and (first or not 0 <= rank < request.worker_count):
        raise ConfigError(
            expected=f"--debug-rank with a rank of host 0, which has the terminal: 0 to {request.worker_count - 1}",
            found=rank,
            fix="give the number of one of these ranks",
        )
    return rank


PYTHON_NAME = re.compile(r"python[0-9.]*")


def check_program(program: Program) -> None:
    """Raise `ConfigError` unless the program exists and can be run."""
    target = program.target
    for text in (target, *program.arguments):
        require_utf8(
            text,
            expected="a program and arguments that are text in UTF-8",
            fix="rename the file, or pass the bytes in another way, such as in a file",
        )
    if program.kind == "script" and not os.path.isfile(target):
        raise ConfigError(
            expected="a Python script",
            found=f"a folder, {target}" if os.path.isdir(target) else f"no file {target} in {os.getcwd()}",
            fix=f"leave out {target!r}: the script itself stands there"
            if PYTHON_NAME.fullmatch(target)
            else "check the path; run a module by -m NAME, code by -c CODE",
        )
    if program.kind == "script" and not os.access(target, os.R_OK):
        raise ConfigError(expected=f"permission to read {target}", found="none", fix=f"chmod u+r {target}")
    if program.kind == "command" and shutil.which(target) is None:
        raise ConfigError(
            expected=f"a command {target}",
            found="no executable file of that name, here or on PATH",
            fix=f"check the name; a file here is ./{target}, and needs chmod +x",
        )
    if program.kind == "module" and not _module_may_exist(target.partition(".")[0]):
        raise ConfigError(
            expected=f"a module {target}",
            found="no such module here or among the installed packages",
            fix="check the name; start in the folder that has it; run a script without -m",
        )


def choose_worker_devices(request: RunRequest, workers: int, *, has_kinds: bool) -> tuple[str, ...]:
    """Return one torch device per worker of this host. Raises `ConfigError`.

    Beside heterogeneous workers, which have the last ranks of the host, the others are on the CPU.

    Args:
        request: The request, with the number of heterogeneous workers of this host.
        workers: The number of workers of this host.
        has_kinds: Whether some host has heterogeneous workers.
    """
    some = request.heterogeneous_workers if has_kinds else workers
    if not some:
        return ("cpu",) * workers
    return ("cpu",) * (workers - some) + choose_devices(request.devices, worker_count=some)


def choose_devices(requested: str | None, *, worker_count: int) -> tuple[str, ...]:
    """Return one torch device per worker, numbered as CUDA numbers the visible GPUs. Raises `ConfigError`."""
    if requested == "cpu":
        return ("cpu",) * worker_count
    present = count_gpus()
    if requested is None:
        return tuple(f"cuda:{rank % present}" for rank in range(worker_count)) if present else ("cpu",) * worker_count
    numbers = [number.strip().removeprefix("cuda:") for number in requested.split(",")]
    if not all(number.isdigit() for number in numbers):
        raise ConfigError(expected="--devices cpu, or GPU numbers as 0,1", found=requested, fix="correct --devices")
    absent = [number for number in numbers if int(number) >= present]
    if absent:
        raise ConfigError(
            expected=f"GPU {', '.join(absent)} on this host",
            found=f"{present} GPUs" if present != 1 else "1 GPU, number 0",
            fix="use --devices cpu" if not present else f"use --devices with numbers below {present}",
        )
    return tuple(f"cuda:{int(numbers[rank % len(numbers)])}" for rank in range(worker_count))


def count_gpus() -> int:
    """Return the number of visible NVIDIA GPUs. It counts the driver's device files, without CUDA."""
    files = glob.glob("/dev/nvidia[0-9]*")
    visible = user_visible_devices()
    return len(files) if visible is None else min(len(files), len(visible))


def _module_may_exist(name: str, folder: str | None = None) -> bool:
    here = os.path.join(folder or os.getcwd(), name)
    return os.path.isfile(here + ".py") or os.path.isdir(here) or importlib.util.find_spec(name) is not None
