"""What Horovod's build would report. Rankless builds nothing, so these functions report what PyTorch provides."""

from rankless.extensions.horovod.common.util import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_enabled() -> bool:
    """Return False: Rankless does not use MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError: Rankless does not use MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def gloo_enabled() -> bool:
    """Return whether PyTorch has Gloo."""
    return gloo_built()
