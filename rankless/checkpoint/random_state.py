"""The state of all generators that a training script draws from."""

import random
from typing import Any

import numpy as np
import torch

from rankless.checkpoint.manifest import Node
from rankless.errors import CheckpointError


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """The states of torch's, numpy's and Python's default generators, and of the GPU's where it is in use.

    `device` is the process's own; its generator comes first under "cuda". On a process without one, those of all
    GPUs follow in their order.
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
    """What rank `rank` takes of the states saved: its own, or the first where there is none for it."""
    return states[rank] if rank < len(states) else states[0]


def restore_random_state(state: Any, device: torch.device) -> None:
    """Set the generators to what `capture_random_state` gave; GPUs as far as both have them.

    Raises CheckpointError, and then has set none of the CPU's.
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
    """The numbers of the GPUs that this process may draw on: its own alone, or all if it has been given none."""
    if device.type == "cuda" and device.index is not None:
        return [device.index]
    first = torch.cuda.current_device()
    return [first, *(number for number in range(torch.cuda.device_count()) if number != first)]
