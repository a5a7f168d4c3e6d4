"""The state of all generators that a training script draws from."""

import random
from typing import Any

import numpy as np
import torch

from rankless.errors import CheckpointError


def capture_random_state() -> dict[str, Any]:
    """The states of torch's (CPU, and CUDA where it is in use), numpy's and Python's default generators."""
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": dict(np.random.get_state(legacy=False)),
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss_next": gauss_next},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what `capture_random_state` gave; CUDA devices as far as both have them."""
    try:
        python = state["python"]
        words = tuple(int(word) for word in python["words"])
        random.setstate((python["version"], words, python["gauss_next"]))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            for device, cuda_state in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(cuda_state, device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            expected="a random state that this Python, numpy and torch understand",
            found=f"{type(error).__name__}: {error}",
            fix="load with random=False, and seed the generators yourself",
        ) from error
