"""The state of all random number generators that a training script uses."""

import random
from typing import Any

import numpy as np
import torch

from rankless.checkpoint.manifest import Node
from rankless.errors import CheckpointError


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's default generators, and of GPUs if CUDA is in use.

    `device` is the process's own, whose generator comes first under "cuda". A process without an own GPU adds those of
    all GPUs in their order.
    """
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": dict(np.random.get_state(legacy=False)),
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss_next": gauss_next},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(number) for number in _list_own_devices(device)]
    return state


def select_rank_state(states: list[Node], rank: int) -> Node:
    """Return the saved state of a rank, or that of rank 0 if the rank has none."""
    return states[rank] if rank < len(states) else states[0]


def restore_random_state(state: Any, device: torch.device) -> None:
    """Set the generators to a state of `capture_random_state`, as far as both have the same GPUs.

    If it raises `CheckpointError`, the generators of the CPU are as they were.
    """
    before = capture_random_state(device)
    try:
        _restore(state, device)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        _restore(before, device)
        raise CheckpointError(
            expected="a random state that this Python, numpy and torch understand",
            found=f"{type(error).__name__}: {error}",
            fix="load with random=False, and seed the generators yourself",
        ) from error


def _restore(state: Any, device: torch.device) -> None:
    python = state["python"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss_next"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for number, cuda_state in zip(_list_own_devices(device), state.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(cuda_state, number)


def _list_own_devices(device: torch.device) -> list[int]:
    """Return the numbers of the GPUs that this process may use: its own, or all if it has none of its own."""
    if device.type == "cuda" and device.index is not None:
        return [device.index]
    first = torch.cuda.current_device()
    return [first, *(number for number in range(torch.cuda.device_count()) if number != first)]
