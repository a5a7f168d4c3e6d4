"""The random generators of the script from which a traced job draws, besides PyTorch's own.

A trace cannot draw from them. It runs without, and an operator's origin has the number of its generator.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rankless.parallel.default_generator import find_default_generator


class ScriptGenerators:
    """The generators that one trace has seen, each with its number."""

    def __init__(self) -> None:
        self.found: list[torch.Generator] = []

    def take(self, kwargs: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """Return the number of the generator among a call's keyword arguments, and the others.

        The number is None without a generator, and for PyTorch's own.
        """
        given = kwargs.get("generator")
        if not isinstance(given, torch.Generator):
            return None, dict(kwargs)
        others = {name: value for name, value in kwargs.items() if name != "generator"}
        if given is find_default_generator(given.device):
            return None, others
        if given not in self.found:
            self.found.append(given)
        return self.found.index(given), others
