"""The variables that torch and its libraries read once, while they are imported."""

from collections.abc import Mapping

# Torch, or a library that it loads, reads these once, during the import. A change has no effect in a worker that is
# forked after it.
_READ_AT_IMPORT = (
    "TORCH_",
    "PYTORCH_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "ATEN_",
    "TORCHINDUCTOR_",
)
# Exceptions: the worker applies these again, or torch reads them when it needs them.
_READ_LATER = (
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_GLOO_",
    # Torch's compiler, which a worker imports when it first compiles, sets these two itself.
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
)


def changes_too_late(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of variables that differ between two environments although torch read them at its import."""
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return sorted(name for name in changed if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER))


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of an environment's variables that the interpreter and torch read only when they start."""
    names = (*_READ_AT_IMPORT, "PYTHON", "LD_", "MALLOC_")
    return {
        name: value for name, value in variables.items() if name.startswith(names) and not name.startswith(_READ_LATER)
    }
