"""The random generators of the script from which a traced job draws, besides PyTorch's own.

A trace cannot draw from them. It runs without, and an operator's origin has the number of its generator. Forks of
PyTorch's generator are further ones; see Note [forked generators].
"""

from collections.abc import Mapping
from typing import Any

import torch

from rankless.compiler.ir.generator_starts import GeneratorStart
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
