"""The batches that loaders will yield next, for jobs that ask servers for rows before a call needs them.

Note [early rows]: a step of several workers changes rows on the servers. The next call can read its rows only after the
step, but the servers can have its ids before. So loaders read one batch early, and after a step each job asks for the
rows that it will look up in the next one. Then the worker's own work between two calls, and the search for different
ids, happen while the servers make the step. This is a prediction: a lookup uses rows that were asked for early only if
its ids are the same, and no step has followed. What the script computes does not depend on it.
"""

from collections.abc import Mapping

from torch import Tensor


class UpcomingBatches:
    """What follows the batches that loaders have yielded."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether a job asks for rows early. Loaders read no batch early before."""
        self._by_loader: dict[object, Mapping[int, Tensor]] = {}

    def note(self, loader: object, following: Mapping[int, Tensor]) -> None:
        """Note that a loader is about to yield a batch.

        Args:
            loader: Identifies the pass over the loader.
            following: For the fingerprint of each tensor of the batch, the tensor in its place in the next batch.
        """
        self._by_loader[loader] = following

    def forget(self, loader: object) -> None:
        """Note that a pass is over."""
        self._by_loader.pop(loader, None)

    def find(self, fingerprint: int) -> Tensor | None:
        """Return the tensor that will have the place of a tensor with a fingerprint; None if that is not known."""
        known = (following.get(fingerprint) for following in self._by_loader.values())
        return next((tensor for tensor in known if tensor is not None), None)
