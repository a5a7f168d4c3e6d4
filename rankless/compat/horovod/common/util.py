"""What scripts import from `horovod.common.util`: what was built, and small things."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")

EXTENSIONS = ("torch",)
"""The frameworks that are supported; nothing is compiled for them."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of that name is supported."""
    if verbose:
        state = "was" if ext_base_name in EXTENSIONS else "was NOT"
        print(f"Extension {ext_base_name} {state} built.")
    return ext_base_name in EXTENSIONS


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Nothing. Raises ImportError for a framework that is not supported."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"Extension {ext_name} has not been built: Rankless has Horovod's API for PyTorch only.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors of that framework can be on a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """False: there is no MPI."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Whether PyTorch has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built(verbose: bool = False) -> int:
    """The version of PyTorch's NCCL as NCCL writes it in one number (2.21.5: 22105); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Whether PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether PyTorch was built for ROCm."""
    return torch.version.hip is not None


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Inside, these environment variables are set; afterwards they are as before. None leaves one alone."""
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
    """Whether there are 1, 2, 4, 8 … ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """The items in so many parts, of which the first may have one more."""
    each, more = divmod(len(items), parts)
    ends = [part * each + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
