"""The functions that scripts import from `horovod.common.util`: available features, and small utilities."""

import contextlib
import functools
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankless.extensions.horovod.exceptions import HorovodVersionMismatchError

Item = TypeVar("Item")

Function = TypeVar("Function", bound=Callable[..., Any])

EXTENSIONS = ("torch",)
"""The supported frameworks. Nothing is compiled for them."""


def _cache(f: Function) -> Function:
    """Return a function that calls `f` once for each combination of arguments. A decorator."""
    return functools.cache(f)  # type: ignore[return-value]  # it takes the same arguments


def get_ext_suffix() -> str:
    """Return how the names of Python's compiled modules end here."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework with that name is supported."""
    if verbose:
        state = "was" if ext_base_name in EXTENSIONS else "was NOT"
        print(f"Extension {ext_base_name} {state} built.")
    return ext_base_name in EXTENSIONS


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if the framework is not supported."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"Extension {ext_name} has not been built: Rankless has Horovod's API for PyTorch only.")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Raise HorovodVersionMismatchError if a script was written for another version of the framework.

    Args:
        name: The framework, "pytorch".
        version: The version that the caller has found.
        exception: The cause of the error. Default none.
    """
    if version != torch.__version__:
        raise HorovodVersionMismatchError(name, version, torch.__version__) from exception


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is `target` or later. Raises ValueError unless `target` looks like `1.2.3`."""
    if not re.fullmatch(r"\d+(\.\d+){2}", target):
        raise ValueError(f"Semantic versioning with exactly three components is required: {target}")
    numbers = [int(part) for part in re.findall(r"\d+", ver.partition("+")[0])[:3]]
    return numbers >= [int(part) for part in target.split(".")]


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework can use a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return False: Rankless does not use MPI."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return whether PyTorch has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built(verbose: bool = False) -> int:
    """Return the version of PyTorch's NCCL as one number (22105 for 2.21.5), or 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: Rankless does not use DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Rankless does not use oneCCL."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return whether PyTorch was built for ROCm."""
    return torch.version.hip is not None


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the duration of the block. A value of None leaves the variable unchanged."""
    changed = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Divide the items into parts, of which the first may have one item more."""
    quotient, remainder = divmod(len(items), parts)
    ends = [part * quotient + min(part, remainder) for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Return whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that chooses the reduction of a call with `op=` or the older `average=`.

    Args:
        reduce_ops: An object with the attributes Average and Sum.
    """

    def choose(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if average is not None:
            warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
            return int(reduce_ops.Average if average else reduce_ops.Sum)
        return int(reduce_ops.Average if op is None else op)

    return choose
