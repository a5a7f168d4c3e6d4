"""When a parameter's gradient is complete: after so many backward passes."""

import weakref
from collections.abc import Callable, Iterable

import torch

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class BackwardPasses:
    """Counts each parameter's passes, by hooks that live as long as this object, and tells when one is complete."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], passes: int, complete: Callable[[torch.Tensor], None]
    ) -> None:
        self.have_begun = False
        """Whether a gradient was computed since the last `restart`."""
        self._passes = passes
        self._complete = complete
        self._left = dict.fromkeys(parameters, passes)
        itself = weakref.ref(self)
        # A parameter outlives the optimizers that were made for it: their hooks must not.
        hooks = [parameter.register_post_accumulate_grad_hook(_hook(itself)) for parameter in self._left]
        self._ends = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def passes(self) -> int:
        """How many passes make a gradient complete. When it is set, counting begins anew."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def unfinished(self) -> list[torch.Tensor]:
        """The parameters whose gradients are not complete."""
        return [parameter for parameter, left in self._left.items() if left > 0]

    def restart(self) -> None:
        """Begin to count anew, as after a step."""
        self._left = dict.fromkeys(self._left, self._passes)
        self.have_begun = False

    def count(self, parameter: torch.Tensor) -> None:
        """A pass has computed the parameter's gradient."""
        left = self._left[parameter] - 1
        if left < 0:
            raise AssertionError(TOO_MANY)
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad:
            raise AssertionError("Gradients that have gradients themselves (create_graph=True) cannot be reduced.")
        self._left[parameter] = left
        self.have_begun = True
        if left == 0:
            self._complete(parameter)


def _hook(passes: weakref.ref[BackwardPasses]) -> Callable[[torch.Tensor], None]:
    def accumulated(parameter: torch.Tensor) -> None:
        counting = passes()
        if counting is not None:
            counting.count(parameter)

    return accumulated
