"""Which backend of `torch.distributed` the default process group of a run has, and whether it can lose workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rankless.config import meaning_of_extension_options
from rankless.config.environment import user_backend
from rankless.config.program_source_files import names_rankless
from rankless.config.run_config import Backend, RunConfig, RunObservation
from rankless.config.shared_memory_support import is_supported
from rankless.errors import ConfigError

BACKENDS: tuple[Backend, ...] = get_args(Backend)
ABORTABLE = ("shared_memory", "hierarchical")
"""The backends whose groups a worker can end for all others, so that none waits for a lost one."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and why a run uses it."""

    name: Backend
    reason: str


def choose_backend(devices_of_hosts: Sequence[Sequence[str]], requested: Backend | None = None) -> BackendChoice:
    """Return the backend of a run.

    Args:
        devices_of_hosts: For each host, the torch device of each of its workers.
        requested: What the user has requested. Default: the fastest backend that the devices allow.
    """
    if requested is not None:
        return BackendChoice(requested, "--backend or RANKLESS_BACKEND requests it")
    on_cpu = [not device.startswith("cuda") for devices in devices_of_hosts for device in devices]
    if not any(on_cpu):
        # NCCL refuses two workers on one GPU.
        if all(len(set(devices)) == len(devices) for devices in devices_of_hosts):
            return BackendChoice("nccl", "every worker has a GPU of its own")
        return BackendChoice("gloo", "workers share a GPU, which NCCL refuses")
    if not all(on_cpu):
        return BackendChoice("gloo", "some workers are on the CPU and some on a GPU")
    if len(devices_of_hosts) == len(on_cpu) > 1:
        return BackendChoice("gloo", "each worker is on the CPU of a host of its own")
    support = is_supported()
    if not support:
        return BackendChoice("gloo", f"no shared memory: {support.reason}")
    if len(devices_of_hosts) > 1:
        return BackendChoice("hierarchical", "the workers are on the CPU of several hosts, some of which have several")
    return BackendChoice("shared_memory", "all workers are on the CPU of one host")


def read_requested_backend(option: str | None) -> Backend | None:
    """Return the backend that an option requests, else RANKLESS_BACKEND; None if neither does.

    Raises:
        ConfigError: There is no such backend.
    """
    given = option if option is not None else user_backend()
    if given is None:
        return None
    for backend in BACKENDS:
        if given == backend:
            return backend
    raise ConfigError(
        expected=f"a backend: {', '.join(BACKENDS)}",
        found=given if option is not None else f"RANKLESS_BACKEND={given}",
        fix="correct it, or omit it: Rankless then chooses the fastest one",
    )


def require_usable_backend(requested: Backend | None, devices: Sequence[str], *, host_count: int) -> None:
    """Raise a `ConfigError` if a requested backend cannot connect workers on these devices of this host."""
    on_cpu = any(not device.startswith("cuda") for device in devices)
    if requested == "nccl" and (on_cpu or len(set(devices)) < len(devices)):
        raise ConfigError(
            expected="a GPU for each worker, which NCCL needs",
            found=f"workers on {', '.join(devices)}",
            fix="omit --backend nccl (RANKLESS_BACKEND), or change -n or --devices",
        )
    if requested not in ("shared_memory", "hierarchical"):
        return
    found = ""
    if any(device.startswith("cuda") for device in devices):
        found = f"workers on {', '.join(devices)}"
    elif (host_count > 1) != (requested == "hierarchical"):
        found = "one host" if host_count == 1 else f"{host_count} hosts"
    elif not (support := is_supported()):
        found = support.reason
    if found:
        where = "one host" if requested == "shared_memory" else "several hosts"
        raise ConfigError(
            expected=f"workers on the CPU of {where}, which can share memory",
            found=found,
            fix=f"omit --backend {requested} (RANKLESS_BACKEND)",
        )


def count_most_lost(config: RunConfig, devices: Sequence[Sequence[str]]) -> int:
    """Return how many killed workers the run continues without: 0 where a step needs every worker.

    Args:
        config: What to run, on host 0.
        devices: For each host, the torch device of each of its workers.
    """
    if explain_required_workers(config, [device for on_host in devices for device in on_host]):
        return 0
    kinds = _find_kinds(config)
    least = max(1, len(kinds), config.request.min_workers or 0)  # one of each kind is left
    return max(0, sum(map(len, devices)) - least)


def require_copies(config: RunConfig) -> None:
    """Raise a `ConfigError` if the user asks for copies of states, and the run cannot use them; see `--copies`.

    Extensions whose processes have copies check those themselves.
    """
    request = config.request
    if not request.copies or request.options:
        return
    if request.copies != 1:
        raise ConfigError(
            expected="--copies 0 or 1: none, or one copy of what one worker alone has",
            found=request.copies,
            fix="give --copies 1",
        )
    count = config.worker_count if config.cluster is None else config.cluster.workers
    reason = "one worker" if count == 1 else explain_required_workers(config, config.devices)
    if reason and request.observation.programs is None:  # `plan` shows the memory of copies
        raise ConfigError(
            expected="a run that can continue without a lost worker, with --copies 1", found=reason, fix="omit --copies"
        )


def require_enough_workers(config: RunConfig) -> None:
    """Raise a `ConfigError` if the user lets workers be lost, and the run needs every one; see `--min-workers`."""
    least, count = config.request.min_workers, config.worker_count
    if least is None:
        return
    if config.cluster is not None:
        count = config.cluster.workers
    if not 1 <= least <= count:
        raise ConfigError(
            expected=f"--min-workers from 1 to {count}, the number of workers at the start",
            found=least,
            fix="give the smallest number of workers with which the run shall continue",
        )
    reason = explain_required_workers(config, config.devices) if least < count else ""
    if reason:
        raise ConfigError(
            expected=f"a run that can continue with {least} of {count} workers",
            found=reason,
            fix="omit --min-workers: the first killed worker then ends the run",
        )


def explain_required_workers(config: RunConfig, devices: Sequence[str]) -> str:
    """Return why a run cannot continue without a killed worker, for errors and the guide; "" if it can.

    Args:
        config: What to run.
        devices: The torch device of each worker.
    """
    request = config.request
    sizes = {axis.role: axis.size for axis in config.mesh if axis.size > 1}
    has_replicas = bool(sizes.keys() & {"data", "sequence"})
    if sizes and not has_replicas and not request.copies and not _find_kinds(config):
        axis = next(iter(sizes))
        return f"the axis {axis} and no axis data, without --copies 1: each worker alone has a part of the model"
    if request.recording is not None or request.observation != RunObservation():
        return "a run that is recorded"
    if config.view.is_logical:
        return "a script without jobs in the logical view: each worker has a part of the step that it is in"
    if any(device != "cpu" for device in devices):
        return "workers with accelerators, whose groups cannot be ended"
    if config.backend not in (None, *ABORTABLE):
        return f"--backend {config.backend} (RANKLESS_BACKEND), whose groups cannot be ended"
    if not (support := is_supported()):
        return f"no shared memory: {support.reason}"
    if request.options:
        return meaning_of_extension_options.explain_required_workers(request)
    return "" if names_rankless(config.program) else "a script that does not use rankless"


def _find_kinds(config: RunConfig) -> Sequence[Sequence[int]]:
    return next((axis.stage_workers for axis in config.mesh if axis.stage_workers), ())


def choose_abortable_backend(chosen: BackendChoice, config: RunConfig) -> BackendChoice:
    """Return a backend whose groups can be ended for all workers, if the run may lose some.

    Args:
        chosen: The backend of a run that loses none.
        config: What to run.
    """
    if chosen.name in ABORTABLE or config.backend is not None or not is_supported():
        return chosen
    return BackendChoice("hierarchical", "workers may be lost, on several hosts")
