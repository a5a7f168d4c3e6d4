"""Forks of PyTorch's generator in a job: `torch.random.fork_rng`, and `torch.manual_seed` within it.

Note [forked generators]: what draws within a fork draws from a generator of its own, and PyTorch's stays as it was, as
after the fork. The first draw gives it its state: that of a seed, or of the generator that was forked, which nothing
has drawn from since. A trace touches no generator.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from rankless.compiler.tracing.script_generators import ScriptGenerators

FORK_CODE = torch.random.fork_rng.__wrapped__.__code__  # type: ignore[attr-defined]  # contextlib sets it
TORCH = "torch"
"""The package whose own forks, as of activation checkpoints, are left to it."""


@contextlib.contextmanager
def trace_forks(generators: ScriptGenerators) -> Iterator[None]:
    """Within the context, forks of PyTorch's generator and seeds within them are traced; other changes are refused.

    A fork has the generators of all GPUs too, so where there are any it is refused as well.
    """
    if torch.cuda.is_available():
        yield
        return

    def get_rng_state() -> Any:
        if not is_fork(sys._getframe(1)):
            return originals["get_rng_state"]()
        generators.fork()
        return None  # `fork_rng` returns it to `set_rng_state`

    def set_rng_state(state: Any) -> None:
        if is_fork(sys._getframe(1)):
            generators.join()
        else:
            originals["set_rng_state"](state)

    def manual_seed(seed: Any) -> Any:
        return generators.seed(int(seed)) if generators.is_forked else originals["manual_seed"](seed)

    replaced: list[Callable[..., Any]] = [get_rng_state, set_rng_state, manual_seed]
    originals = {item.__name__: getattr(torch, item.__name__) for item in replaced}
    for owner in (torch, torch.random):
        for item in replaced:
            setattr(owner, item.__name__, item)
    try:
        yield
    finally:
        for owner in (torch, torch.random):
            for name, original in originals.items():
                setattr(owner, name, original)


def is_fork(frame: FrameType) -> bool:
    """Return whether `fork_rng` calls, for anything but PyTorch itself."""
    if frame.f_code is not FORK_CODE:
        return False
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == "contextlib":
        caller = caller.f_back
    return caller is None or str(caller.f_globals.get("__name__", "")).split(".")[0] != TORCH
