"""How far two right runs may be apart, measured; or as far as the user says.

# Note [what is allowed]: two right runs sum in different orders, so they differ by rounding, and training
# amplifies it. How much, no constant can say; the noise run can: the one-worker run with its last bits
# disturbed (views/recording.py, Note [noise floor]). A difference is allowed up to the largest of
#   - 10 x the noise in the same tensor, the largest of this and earlier steps;
#   - the rounding bound: 1e-12 (float64), 1e-5 (float32), 1e-2 (float16), 5e-2 (bfloat16) of the tensor's
#     largest element, or of its norm where only a sketch is kept;
#   - 10 rounding errors (eps) of the largest parameter, 100 of the largest gradient: some tensors are zero but
#     for rounding, and a gradient is a sum over the whole batch;
#   - twice the tensor's own motion, for a parameter whose gradient the noise changes by a tenth or more of its
#     norm: it is all rounding, and an adaptive optimizer makes whole steps of it, in any direction.
# An integer result must be equal, unless the noise run's differs too (10 x that), or unless the relative noise
# of float results and parameters so far, ten times over, makes a flip likelier than one in ten among what was counted:
# then as many as it makes likely, but not more than 2 % of what was counted, and at least one.
# Ranks of one run must agree within the rounding bound alone: they hold copies, and copies do not drift apart.
# Where a max-pool, a ReLU or an argmax is turned over by rounding, a step jumps, and one noise run need not jump
# at the same one. No measured floor bounds that; exacter arithmetic does: `needs_float64` says when it is to decide,
# also where noise is so loud that faults could hide in it (docs/decisions/0004-noise-floor.md).
# If the one-worker run's repetition differs by over 1,000 x the rounding bound before its first step is made,
# the script is not repeatable, and nothing can be said.
# A bound of the user's own (`--tolerance`) takes the place of all this for floating-point tensors: a part of the
# tensor's largest element or norm, though never less than the rounding errors of the third rule, since no computer
# meets that. What is whole numbers, and what is all rounding, stays under the rules above.
"""

import math
from collections.abc import Mapping, Sequence

from rankless.verify.differences import RESOLUTION, Difference

NOISE_FACTOR = 10.0
ROUNDING_ERRORS = 10.0
GRADIENT_ROUNDING_ERRORS = 100.0
ROUNDING_BOUND: Mapping[str, float] = {
    "float64": 1e-12,
    "complex128": 1e-12,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
ALL_ROUNDING = 0.1
"""A gradient that the noise changes by this part of its norm says nothing but rounding."""
LIKELY_FLIP = 0.1
MOST_FLIPS = 0.02


class NoiseFloor:
    """How far a difference may go, learned from how far the noise runs are from the one-worker run.

    `tolerance` is a bound of the user's own, as a part of each tensor.
    """

    def __init__(self, noise: Sequence[Sequence[Difference]], *, tolerance: float | None = None) -> None:
        self.tolerance = tolerance
        self._noise: dict[tuple[str, str, int], float] = {}
        self._relative: dict[int, float] = {}
        self._last: dict[str, float] = {}
        self._all_rounding: dict[str, int] = {}
        for differences in noise:
            self._learn(differences)

    def _learn(self, differences: Sequence[Difference]) -> None:
        running: dict[tuple[str, str], float] = {}
        relative = 0.0
        for item in differences:
            position = item.location.position
            tensor = (item.kind, item.tensor)
            running[tensor] = max(running.get(tensor, 0.0), item.size)
            key = (*tensor, position)
            self._noise[key] = max(self._noise.get(key, 0.0), running[tensor])
            if item.kind in ("result", "parameter") and not item.is_integer_result and item.scale > 0:
                relative = max(relative, item.size / item.scale)
            self._relative[position] = max(self._relative.get(position, 0.0), relative)
            if item.kind == "parameter":
                self._last[item.tensor] = max(self._last.get(item.tensor, 0.0), running[tensor])
            if item.kind == "gradient" and item.size > ALL_ROUNDING * item.scale:
                name = item.tensor.removeprefix("gradient of ")
                self._all_rounding[name] = min(self._all_rounding.get(name, position), position)

    def noise(self, item: Difference) -> float:
        """The noise in this tensor so far."""
        noise = self._noise.get((item.kind, item.tensor, item.location.position), 0.0)
        if item.kind == "final":
            # A lone number may by chance end where it would have without noise; its way there tells more.
            noise = max(noise, self._last.get(item.tensor, 0.0) / math.sqrt(max(1, item.count)))
        return noise

    def limit(self, item: Difference) -> float:
        """The largest `size` that is still the same training."""
        if self.tolerance is not None and not item.is_integer_result and not self.is_all_rounding(item):
            return max(self.tolerance * item.scale, rounding_errors(item))
        limit = max(NOISE_FACTOR * self.noise(item), rounding_limit(item))
        if item.is_integer_result:
            flips = NOISE_FACTOR * self._relative.get(item.location.position, 0.0) * item.count
            if flips >= LIKELY_FLIP:
                limit = max(limit, math.ceil(min(flips, MOST_FLIPS * item.count)))
        if item.kind in ("parameter", "final") and self.is_all_rounding(item):
            limit = max(limit, 2 * item.motion)
        return limit

    def is_all_rounding(self, item: Difference) -> bool:
        """Whether this is a parameter, or the gradient of one, whose gradient has said nothing but rounding by now."""
        name = item.tensor.removeprefix("gradient of ")
        return self._all_rounding.get(name, math.inf) <= item.location.position

    @property
    def all_rounding(self) -> tuple[str, ...]:
        """The parameters whose gradients are all rounding: in effect they are not compared."""
        return tuple(sorted(self._all_rounding))

    def relative(self, item: Difference) -> float:
        """The size as a part of the tensor, for what a tolerance is about; 0 for all else.

        Lone rounding errors are taken as a part of the largest tensor of their kind: their own may be nothing else.
        """
        if item.is_integer_result or self.is_all_rounding(item) or item.size == 0:
            return 0.0
        if item.size <= rounding_errors(item):
            return item.size / item.resolution * RESOLUTION[item.dtype]
        return item.size / item.scale if item.scale > 0 else math.inf


def rounding_limit(item: Difference) -> float:
    """What rounding alone explains, with no training between."""
    return max(ROUNDING_BOUND.get(item.dtype, 0.0) * item.scale, rounding_errors(item))


def rounding_errors(item: Difference) -> float:
    """What rounding makes of a tensor that is zero but for it."""
    errors = GRADIENT_ROUNDING_ERRORS if item.kind == "gradient" else ROUNDING_ERRORS
    return errors * item.resolution
