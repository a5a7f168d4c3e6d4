"""Counts backward passes: a gradient is complete after a fixed number of them."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class BackwardPasses:
    """Counts the passes of each parameter with hooks, which it removes at its end.

    Args:
        parameters: The parameters to watch.
        passes: The number of passes that make a gradient complete.
        on_complete: Called with the parameter when its gradient is complete.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], passes: int, on_complete: Callable[[torch.Tensor], None]
    ) -> None:
        self.has_gradients = False
        """Whether backward has computed a gradient since the last `restart`."""
        self._passes = passes
        self._on_complete = on_complete
        self._remaining: dict[torch.Tensor, int] = {}
        hooks: list[Any] = []
        self._hooks = hooks
        # A parameter outlives the optimizers made for it. Their hooks must not keep them alive.
        self._finalizer = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the passes of further parameters, from the next pass on."""
        reference = weakref.ref(self)
        for parameter in parameters:
            self._remaining[parameter] = self._passes
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_make_hook(reference)))

    @property
    def remaining(self) -> dict[torch.Tensor, int]:
        """How many passes each parameter still needs."""
        return self._remaining

    @property
    def passes(self) -> int:
        """The number of passes that make a gradient complete. Setting it restarts the count."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        self._remaining = dict.fromkeys(self._remaining, passes)

    def get_incomplete(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are not complete."""
        return [parameter for parameter, remaining in self._remaining.items() if remaining > 0]

    def restart(self) -> None:
        """Restart the count, as after a step."""
        self._remaining = dict.fromkeys(self._remaining, self._passes)
        self.has_gradients = False

    def count(self, parameter: torch.Tensor) -> None:
        """Count a pass that has computed the parameter's gradient."""
        remaining = self._remaining[parameter] - 1
        if remaining < 0:
            raise AssertionError(TOO_MANY)
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad:
            raise AssertionError("Gradients that have gradients themselves (create_graph=True) cannot be reduced.")
        self._remaining[parameter] = remaining
        self.has_gradients = True
        if remaining == 0:
            self._on_complete(parameter)


def _make_hook(passes: weakref.ref[BackwardPasses]) -> Callable[[torch.Tensor], None]:
    def count_pass(parameter: torch.Tensor) -> None:
        counter = passes()
        if counter is not None:
            counter.count(parameter)

    return count_pass
