"""Turns fleetrun's options into a `RunRequest`."""

import os
import shutil
from collections.abc import Sequence

from rankless.config.environment import default_log_folder, user_visible_devices
from rankless.config.make_run_config import count_gpus
from rankless.config.mesh_option import divide_ranks
from rankless.config.run_config import Program, RunRequest
from rankless.errors import ConfigError
from rankless.extensions.fleetrun.hosts import make_cluster
from rankless.extensions.fleetrun.parameter_server_options import ParameterServerJob, read_parameter_server_job
from rankless.extensions.fleetrun.parser import FleetrunFlags, user_first_port
from rankless.extensions.fleetrun.profile import FleetrunSettings, make_fleetrun_spec, share_out
from rankless.extensions.servers.config import NAME as SERVERS
from rankless.extensions.servers.config import make_settings

_CPU_BACKENDS = ("gloo",)
_GPU_BACKENDS = ("nccl",)
_EITHER = ("auto", "")
_FALSE = ("", "0", "false", "False", "no", "off")


def fleetrun_program(flags: FleetrunFlags) -> Program:
    """Return the program of the command line, a Python script or a command. Raises `ConfigError` if it has none."""
    if not flags.training_script:
        raise ConfigError(
            expected="a script to run", found="none", fix="name one, as in `rankless fleetrun --gpus=0,1 train.py`"
        )
    target, *arguments = flags.training_script
    is_file = os.path.isfile(target)
    can_be_run = os.access(target, os.X_OK) if is_file else shutil.which(target) is not None
    is_command = can_be_run and not target.endswith(".py")
    return Program(kind="command" if is_command else "script", target=target, arguments=tuple(arguments))


def fleetrun_request(flags: FleetrunFlags, program: Program) -> RunRequest:
    """Return the request. Raises `ConfigError` for invalid values, and for features that Rankless does not have."""
    job = read_parameter_server_job(flags)
    _require_known(flags, with_servers=job is not None)
    cluster = None if job is None or not job.hosts else make_cluster(flags, workers=1, listed=job.hosts)
    own = None if cluster is None else cluster.hosts[cluster.host_index]
    gpus = chosen_gpus(flags) if own is None or own.workers > 0 else ()
    count = flags.nproc_per_node if job is None else job.worker_count
    if own is not None:
        count = own.workers
    if count is None:
        count = len(gpus) or 1
    if count < 1 and cluster is None:
        raise ConfigError(expected="--nproc_per_node from 1 up", found=count, fix="omit it: one process per GPU")
    first_port = flags.start_port if flags.start_port is not None else user_first_port()
    if first_port is not None and not 0 < first_port < 2**16 - count:
        raise ConfigError(expected="--start_port from 1 to 65535", found=first_port, fix="omit it")
    total = 0 if job is None else job.heterogeneous
    heterogeneous = total if own is None else own.heterogeneous
    shares = _share_with_kinds(flags, gpus, count, heterogeneous) if total else _share_gpus(gpus, count, job)
    if cluster is None:
        cluster = make_cluster(flags, workers=count, heterogeneous=heterogeneous)
    kinds = [(count, heterogeneous)]
    if cluster is not None:
        kinds = [(host.workers, host.heterogeneous) for host in cluster.hosts]
    return RunRequest(
        worker_count=count,
        devices=",".join(str(share[0]) for share in shares if share) or "cpu",
        log_folder=flags.log_dir or default_log_folder(),
        warm=program.kind != "command",
        launcher=make_fleetrun_spec(
            FleetrunSettings(
                job_id=flags.job_id,
                shares=shares,
                hides_gpus=_wants_cpu(flags),
                first_port=first_port,
                endpoints=() if job is None else tuple(map(str, job.workers)),
                heterogeneous=divide_ranks(kinds)[1],
                http_port=flags.http_port,
            )
        ),
        cluster=cluster,
        heterogeneous_workers=heterogeneous,
        options={} if job is None else {SERVERS: make_settings(job.servers)},
    )


def _share_gpus(gpus: Sequence[int], count: int, job: ParameterServerJob | None) -> tuple[tuple[int, ...], ...]:
    """Return each worker's GPUs. Beside servers each has one, which others may share; servers have none."""
    if not gpus:
        return ()
    return share_out(gpus if job is None else gpus[:count], count)


def _share_with_kinds(
    flags: FleetrunFlags, gpus: Sequence[int], count: int, heterogeneous: int
) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each worker of this host: heterogeneous ones, which come last, take them, the others none."""
    if not gpus or not heterogeneous or flags.heter_devices == "cpu":
        return ()
    return ((),) * (count - heterogeneous) + share_out(gpus[:heterogeneous], heterogeneous)


def chosen_gpus(flags: FleetrunFlags) -> Sequence[int]:
    """Return the GPUs to use, numbered as CUDA numbers the visible ones; none for the CPU.

    As in Paddle, `--gpus` uses the names of CUDA_VISIBLE_DEVICES if that is set. Raises `ConfigError` for GPUs that are
    not there.
    """
    if _wants_cpu(flags):
        return ()
    present = count_gpus()
    visible = user_visible_devices()
    names = [str(number) for number in range(present)] if visible is None else visible[:present]
    wanted = names if not flags.devices else [name.strip() for name in flags.devices.split(",")]
    absent = [name for name in wanted if name not in names]
    if absent or (flags.backend in _GPU_BACKENDS and not wanted):
        seen = f"GPU {', '.join(names)}" if names else "no GPU"
        raise ConfigError(
            expected=f"GPU {', '.join(absent)} on this host" if absent else "a GPU, as NCCL needs one",
            found=seen if visible is None else f"{seen} with CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix=f"choose from --gpus={','.join(names)}"
            if names
            else "omit --gpus and --backend: one process on the CPU, or more by --nproc_per_node=2",
        )
    return [names.index(name) for name in wanted]


def _wants_cpu(flags: FleetrunFlags) -> bool:
    return flags.backend in _CPU_BACKENDS or flags.devices == "cpu"


def describe_ignored_options(flags: FleetrunFlags) -> list[str]:
    """Return a line about each given option that has no effect, or another one than in Paddle."""
    notes = {
        "--host": flags.host is not None and "not needed: Rankless finds a host by its addresses",
        "--log_level": flags.log_level is not None and "ignored: Rankless has no log levels",
        "--log_overwrite": flags.log_overwrite is not None and "not needed: each run has its own files",
        "--with_gloo": flags.with_gloo is not None and "ignored: the script makes its own groups",
        "--max_restart": bool(flags.max_restart) and "Rankless restarts nothing: the first failure ends the run",
        "--elastic_level, --elastic_timeout": (flags.elastic_level or -1, flags.elastic_timeout) != (-1, None)
        and "ignored: hosts cannot join or leave",
        "--elastic_pre_hook": flags.elastic_pre_hook is not None and "ignored: Rankless does not run it",
        "--force": _is_on(flags.force) and "ignored: hosts cannot join or leave",
        "--sort_ip": _is_on(flags.sort_ip) and "ignored: --ips or --rank give the order of hosts",
        "--legacy": _is_on(flags.legacy) and "not needed: there is one launcher",
        "--enable_gpu_log": _is_on(flags.enable_gpu_log) and "ignored: Rankless does not log GPUs",
        "--ranks, --rank_mapping_path": _maps_ranks(flags) and "ignored: ranks follow the order of hosts and GPUs",
        "--http_port, --gloo_port": (flags.http_port, flags.gloo_port) != (None, None)
        and "not used: the workers' own store takes their place",
        "--auto_parallel_config, --auto_tuner_json": _tunes(flags) and "ignored: Rankless does not tune",
    }
    return [f"{name}: {why}" for name, why in notes.items() if why]


def _require_known(flags: FleetrunFlags, *, with_servers: bool) -> None:
    if not with_servers and flags.run_mode not in (None, "", "collective"):
        raise ConfigError(expected="--run_mode collective or ps", found=flags.run_mode, fix="omit it")
    if flags.backend is not None and flags.backend not in (*_EITHER, *_CPU_BACKENDS, *_GPU_BACKENDS):
        raise ConfigError(expected="--backend auto, nccl (GPUs) or gloo (the CPU)", found=flags.backend, fix="omit it")
    for name in ("npus", "xpus"):
        if getattr(flags, name):
            raise ConfigError(
                expected="--gpus, or the CPU",
                found=f"--{name}={getattr(flags, name)}",
                fix="omit it: PyTorch here supports NVIDIA GPUs only",
            )


def _is_on(text: str | None) -> bool:
    return text is not None and text not in _FALSE


def _maps_ranks(flags: FleetrunFlags) -> bool:
    switches = (flags.enable_rank_mapping, flags.enable_auto_mapping)
    return any((flags.ranks, flags.rank_mapping_path, flags.cluster_topo_path, *map(_is_on, switches)))


def _tunes(flags: FleetrunFlags) -> bool:
    return any((flags.auto_parallel_config, flags.auto_tuner_json, _is_on(flags.auto_cluster_config)))
