"""How a generator that a job forks gets its state; see Note [forked generators]."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class GeneratorStart:
    """The state of a forked generator before its first draw.

    Args:
        seed: The seed that the job gives to it, or None.
        parent: The generator that it is a fork of, without a seed. None for PyTorch's own.
    """

    seed: int | None = None
    parent: torch.Generator | None = None

    def apply(self, generator: torch.Generator, default: torch.Generator) -> None:
        """Set the state of a generator, given PyTorch's own."""
        if self.seed is not None:
            generator.manual_seed(self.seed)
        else:
            generator.set_state((default if self.parent is None else self.parent).get_state())
