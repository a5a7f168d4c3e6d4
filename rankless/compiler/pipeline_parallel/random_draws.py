"""Random numbers in a pipeline: each stage draws what the script would draw there, in whatever order units run.

Note [draws of stages]: the operators of a program draw from one generator, one after another. Before the units run,
each worker calls all of them, notes the state of the generator before each, and drops what they return. An operator
then draws from the noted state, once for each microbatch, and keeps its part. All workers leave the generator in the
same state. So every worker must know what an operator takes before the units run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from rankless.compiler.ir.local_kernels import DrawFrom
from rankless.compiler.ir.logical_program import is_random_node
from rankless.parallel.default_generator import find_default_generator


def draws_numbers(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers. Fused attention without dropout does not."""
    if not is_random_node(node):
        return False
    operator: Any = node.target
    for position, described in enumerate(operator._schema.arguments):
        if described.name == "dropout_p":
            given = node.kwargs.get("dropout_p", described.default_value)
            return bool((node.args[position] if position < len(node.args) else given) != 0)
    return True


class RandomDraws:
    """The states of generators before each draw of the present step, and after all.

    Args:
        device: The device whose default generator PyTorch draws from.
    """

    def __init__(self, device: torch.device) -> None:
        self.default = find_default_generator(device)
        self.states: dict[str, Tensor] = {}
        """The state before each draw, by the name of the node that draws."""
        self.final: dict[torch.Generator, Tensor] = {}

    def end(self) -> None:
        """Leave the generators as after the whole step."""
        for generator, state in self.final.items():
            generator.set_state(state)


class OrderedDraw:
    """The draw of one node, which gives what it would in the order of the script; see Note [draws of stages]."""

    def __init__(self, draws: RandomDraws, name: str, function: Callable[..., Any]) -> None:
        self._draws, self._name, self._function = draws, name, function
        self._draw = function.draw if isinstance(function, DrawFrom) else function
        self._generator = function.generator if isinstance(function, DrawFrom) else draws.default

    def note_draw(self, *args: Any, **kwargs: Any) -> None:
        """Draw in the order of the script: note the state before, and advance the generator."""
        if isinstance(self._function, DrawFrom):
            self._function.begin()
        self._draws.states[self._name] = self._generator.get_state()
        self._draw(*args, **kwargs)
        self._draws.final[self._generator] = self._generator.get_state()

    def run_draw(self, *args: Any, **kwargs: Any) -> Any:
        """Draw from the noted state, in a unit."""
        self._generator.set_state(self._draws.states[self._name])
        return self._draw(*args, **kwargs)
