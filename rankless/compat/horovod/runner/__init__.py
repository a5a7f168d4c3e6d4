"""Running a function on several processes, as `horovod.run` does.

Enters: a function and horovodrun's options. Leaves: what it returned, by rank. Scripts call it; inside, `function_job`
starts `rankless horovodrun` and serves the function, `run_task` is what each process runs.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankless.compat.horovod.runner.function_job import run_function
from rankless.plan.horovodrun_flags import HorovodrunFlags


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """What `func(*args, **kwargs)` returned on each of `num_proc` processes, by rank.

    The function, its arguments and results travel by cloudpickle; the other parameters are horovodrun's options. Raises
    RuntimeError if a process fails, with the traceback of the first that raised; ValueError for two that exclude each
    other.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    count = _renamed("num_proc", None if num_proc == 1 else num_proc, "np", np)
    flags = HorovodrunFlags(
        num_proc=1 if count is None else count,
        min_num_proc=_renamed("min_num_proc", min_num_proc, "min_np", min_np),
        max_num_proc=_renamed("max_num_proc", max_num_proc, "max_np", max_np),
        slots_per_host=slots,
        reset_limit=reset_limit,
        blacklist_cooldown_range=None if cooldown_range is None else (cooldown_range[0], cooldown_range[1]),
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        disable_cache=bool(disable_cache),
        output_filename=output_filename,
        verbose=bool(verbose),
        gloo=bool(use_gloo),
        mpi=bool(use_mpi),
        mpi_args=mpi_args,
        network_interfaces=tuple(network_interface.split(",")) if network_interface else (),
    )
    return run_function(func, tuple(args), dict(kwargs or {}), flags, executable=executable)


def _renamed(name: str, value: int | None, old: str, given: int | None) -> int | None:
    if given is None:
        return value
    warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
    return given if value is None else value
