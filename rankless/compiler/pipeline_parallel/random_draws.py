"""Random numbers in a pipeline: each stage draws what the script would draw there, in whatever order units run.

Note [draws of stages]: the operators of a program draw from one generator, one after another. Before the units run,
each worker calls all of them, notes the state of the generator before each, and drops what they return. An operator
then draws from the noted state, once for each microbatch, and keeps its part. All workers leave the generator in the
same state. So every worker must know what an operator takes before the units run.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
        self._default = find_default_generator(device)
        self._states: dict[str, Tensor] = {}
        self._final: dict[torch.Generator, Tensor] = {}

    def _find_generator(self, function: Callable[..., Any]) -> torch.Generator:
        return function.generator if isinstance(function, DrawFrom) else self._default

    def note(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the state before a draw, and advance the generator through it."""
        generator = self._find_generator(function)
        if isinstance(function, DrawFrom):
            function.begin()
            function = function.draw
        self._states[name] = generator.get_state()
        function(*args, **kwargs)
        self._final[generator] = generator.get_state()

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that draws, from the state of this step."""
        self._find_generator(function).set_state(self._states[name])
        return (function.draw if isinstance(function, DrawFrom) else function)(*args, **kwargs)

    def end(self) -> None:
        """Leave the generators as after the whole step."""
        for generator, state in self._final.items():
            generator.set_state(state)


@dataclass(frozen=True, eq=False)
class OrderedDraw:
    """A draw of a program, which gives what it would in the order of the script; see Note [draws of stages].

    Attributes:
        draws (RandomDraws): The states of generators.
        name (str): The node that draws.
        function (Callable[..., Any]): The function that draws.
    """

    draws: RandomDraws
    name: str
    function: Callable[..., Any]

    def note_draw(self, *args: Any, **kwargs: Any) -> None:
        """Draw in the order of the script, for the state of the generator alone."""
        self.draws.note(self.name, self.function, args, kwargs)

    def run_draw(self, *args: Any, **kwargs: Any) -> Any:
        """Draw from the noted state, in a unit."""
        return self.draws.run(self.name, self.function, args, kwargs)
