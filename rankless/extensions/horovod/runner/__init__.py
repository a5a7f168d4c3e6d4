"""Runs a function on several processes, as `horovod.run` does.

Enters: a function and horovodrun's options, from scripts. Leaves: the return values, by rank. `function_job` starts
`rankless horovodrun` and serves the function. Each process runs `run_task`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankless.extensions.horovod.runner.function_job import make_flags, run_function


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
    """Call `func(*args, **kwargs)` on each of `num_proc` processes, and return the results by rank.

    cloudpickle serializes the function, its arguments and results. The other parameters are horovodrun's options.

    Raises:
        RuntimeError: A process failed. The text contains the traceback of the first that raised.
        ValueError: Two parameters exclude each other.
    """
    keywords = dict(locals())
    return run_function(func, tuple(args), dict(kwargs or {}), make_flags(keywords), executable=executable)
