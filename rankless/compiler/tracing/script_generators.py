"""The random generators of the script from which a traced job draws, besides PyTorch's own.

A trace cannot draw from them. It runs without, and an operator's origin has the number of its generator. Forks of
PyTorch's generator are further ones; see Note [forked generators].

Note [forked generators]: `torch.random.fork_rng`, and `torch.manual_seed` within it, fork it. What draws in a fork
draws from a generator of its own, and PyTorch's stays as it was, as after the fork. The first draw gives it its state:
that of a seed, or of the generator that was forked, which nothing has drawn from since. A trace touches no generator.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from rankless.compiler.ir.local_kernels import GeneratorStart
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.parallel.default_generator import find_default_generator


class ScriptGenerators:
    """The generators that one trace has seen, each with its number."""

    def __init__(self) -> None:
        self.found: list[torch.Generator] = []
        self.starts: dict[torch.Generator, GeneratorStart] = {}
        """How each of them that is a fork gets its state."""
        self._forks: list[torch.Generator] = []
        """The generators of the forks that surround the present operator."""

    def begin_pass(self) -> None:
        """Begin another trace of the same job."""
        self.found = [item for item in self.found if item not in self.starts]
        self.starts, self._forks = {}, []

    @property
    def is_forked(self) -> bool:
        """Whether a fork surrounds the present operator."""
        return bool(self._forks)

    def fork(self) -> None:
        """Draw from a fork of the present generator until `join`."""
        self._forks.append(self._add_fork(GeneratorStart(parent=self._forks[-1] if self._forks else None)))

    def join(self) -> None:
        """Draw from the generator before the last fork again."""
        self._forks.pop()

    def seed(self, seed: int) -> torch.Generator:
        """Draw from a generator with this seed for the rest of the fork."""
        self._forks[-1] = self._add_fork(GeneratorStart(seed=seed))
        return self._forks[-1]

    def _add_fork(self, start: GeneratorStart) -> torch.Generator:
        generator = torch.Generator()
        self.found.append(generator)
        self.starts[generator] = start
        return generator

    def take(self, kwargs: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """Return the number of the generator among a call's keyword arguments, and the others.

        Without a generator, and for PyTorch's own, it is that of the fork around the call, or None.
        """
        given = kwargs.get("generator")
        forked = self.found.index(self._forks[-1]) if self._forks else None
        if not isinstance(given, torch.Generator):
            return forked, dict(kwargs)
        others = {name: value for name, value in kwargs.items() if name != "generator"}
        if given is find_default_generator(given.device):
            return forked, others
        if given not in self.found:
            self.found.append(given)
        return self.found.index(given), others


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

    functions: list[Callable[..., Any]] = [get_rng_state, set_rng_state, manual_seed]
    originals = {item.__name__: getattr(torch, item.__name__) for item in functions}
    with replace_attributes(*((owner, item.__name__, item) for owner in (torch, torch.random) for item in functions)):
        yield


def is_fork(frame: FrameType) -> bool:
    """Return whether `fork_rng` calls, for anything but PyTorch itself."""
    if frame.f_code is not FORK_CODE:
        return False
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == "contextlib":
        caller = caller.f_back
    return caller is None or str(caller.f_globals.get("__name__", "")).split(".")[0] != TORCH
