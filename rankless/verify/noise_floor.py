"""The limits of differences between two correct runs: measured from a noise run, or given by the user.

Note [what is allowed]: two correct runs sum in different orders, so they differ by rounding, and training amplifies the
difference. No constant tells by how much. The noise run does: the one-worker run with perturbed last bits
(jobs/last_bit_perturbation.py, Note [noise floor]). The limit of a difference is the largest of
  - 10 x the noise in the same tensor, the largest of this and earlier steps; 100 x in float64, where the smallest fault
    is still a million times larger than rounding, and where a tensor's noise in a single run may by chance be small;
  - the rounding bound: 1e-12 (float64), 1e-5 (float32), 1e-2 (float16), 5e-2 (bfloat16) of the tensor's
    largest element, or of its norm if only a sketch is kept;
  - 10 rounding errors (eps) of the largest parameter, 100 of the largest gradient and, in float64, of the largest
    result: some tensors are zero up to rounding, and a gradient is a sum over the whole batch;
  - twice the length of the tensor's path in the one-worker runs, for a parameter whose gradient is all rounding: an
    adaptive optimizer makes whole steps of it in any direction. A gradient is all rounding if the noise changes it by a
    tenth or more of its norm, and if its norm is at most 10,000 rounding errors of the largest gradient. The rule holds
    only if the noise moves the parameter as well, and a comparison in float32 that needs it is repeated in float64.

An integer result must be equal with two exceptions. If the noise run's result differs too, the limit is 10 x that. If
the relative noise of float results and parameters so far, times ten, makes a flip likelier than one in ten among the
counted units, the limit is the likely number of flips: at least one, and at most 2 % of the counted units.

The noise run may end before the other runs. From there on the noise counts as what it was at its end, and the rule for
parameters whose gradients are all rounding does not hold. Each limit is then at most what a whole noise run would make
it, so a comparison that passes would have passed. One that does not pass says nothing: `run_and_decide` makes the noise
run whole.

Ranks of one run must agree within the rounding bound alone, because they hold copies, and copies do not diverge.

If rounding flips a max-pool, a ReLU or an argmax, a step jumps, and the noise run need not jump at the same step. No
measured noise bounds that, but more precise arithmetic does. `Comparison.needs_float64` says when it should decide.

A limit may be so high that it hides faults; `differences_beyond_tolerance` finds such limits. Then the training is not
called the same (docs/decisions/0004-noise-floor.md, 0019-three-outcomes.md).

If the one-worker run's repetition differs by over 1,000 x the rounding bound before its first step, the script is not
repeatable, and there is no verdict.

A user's bound (`--tolerance`) replaces all this for floating-point tensors. It is relative to the tensor's largest
element or norm, but never below the rounding errors of the third rule, which no computer meets. Integers, and tensors
that are all rounding, keep the rules above.
"""

import math
from collections.abc import Mapping, Sequence

from rankless.verify.differences import RESOLUTION, Difference

NOISE_FACTOR = 10.0
NOISE_FACTOR_FLOAT64 = 100.0
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
"""A gradient that noise changes by this fraction of its norm may consist of rounding errors only."""
ALL_ROUNDING_ERRORS = 1e4
"""The largest norm of such a gradient, in rounding errors of the largest gradient of its step."""
MOVED_BY_ROUNDING = 1e-3
"""The smallest noise of a parameter, as a fraction of its path, that shows that rounding drives its steps. A parameter
that something else moves, such as weight decay, is compared like any other.
"""
LIKELY_FLIP = 0.1
MOST_FLIPS = 0.02


class NoiseFloor:
    """The limits of differences, learned from how far the noise runs differ from the one-worker run.

    `tolerance` is the user's bound, relative to each tensor.
    """

    def __init__(self, noise: Sequence[Sequence[Difference]], *, tolerance: float | None = None) -> None:
        self.tolerance = tolerance
        self._noise: dict[tuple[str, str, int], float] = {}
        self._relative: dict[int, float] = {}
        self._end = 0
        """The last position of a noise run. From there on the next two count."""
        self._last_noise: dict[tuple[str, str], float] = {}
        self._last_relative = 0.0
        self._last: dict[str, float] = {}
        self._paths: dict[str, float] = {}
        self._all_rounding: dict[str, int] = {}
        for differences in noise:
            self._learn(differences)

    def _learn(self, differences: Sequence[Difference]) -> None:
        running: dict[tuple[str, str], float] = {}
        relative_size = 0.0
        for item in differences:
            position = item.location.position
            tensor = (item.kind, item.tensor)
            running[tensor] = max(running.get(tensor, 0.0), item.size)
            key = (*tensor, position)
            self._noise[key] = max(self._noise.get(key, 0.0), running[tensor])
            if item.kind in ("result", "parameter") and not item.is_integer_result and item.scale > 0:
                relative_size = max(relative_size, item.size / item.scale)
            self._relative[position] = max(self._relative.get(position, 0.0), relative_size)
            if item.kind == "parameter":
                self._last[item.tensor] = max(self._last.get(item.tensor, 0.0), running[tensor])
            if item.kind in ("parameter", "final"):
                self._paths[item.tensor] = max(self._paths.get(item.tensor, 0.0), item.path)
            if is_rounding_gradient(item):
                name = item.tensor.removeprefix("gradient of ")
                self._all_rounding[name] = min(self._all_rounding.get(name, position), position)
            self._end = max(self._end, position)
        for name_of_kind, size in running.items():
            self._last_noise[name_of_kind] = max(self._last_noise.get(name_of_kind, 0.0), size)
        self._last_relative = max(self._last_relative, relative_size)

    def noise(self, item: Difference) -> float:
        """Return the noise in this tensor so far."""
        tensor = (item.kind, item.tensor)
        noise = self._noise.get((*tensor, item.location.position), self._last_noise.get(tensor, 0.0))
        if item.kind == "final":
            # A single number may by chance end where it would have without noise, so use its history too.
            noise = max(noise, self._last.get(item.tensor, 0.0) / math.sqrt(max(1, item.count)))
        return noise

    def limit(self, item: Difference) -> float:
        """Return the largest `size` that is still the same training."""
        limit = self.limit_of_noise(item)
        path = self._paths.get(item.tensor, 0.0)
        moved_by_rounding = self._last.get(item.tensor, 0.0) >= MOVED_BY_ROUNDING * path
        is_measured = item.location.position <= self._end
        if item.kind in ("parameter", "final") and is_measured and self.is_all_rounding(item) and moved_by_rounding:
            limit = max(limit, 2 * path)
        return limit

    def limit_of_noise(self, item: Difference) -> float:
        """Return the limit without the rule for parameters whose gradients are all rounding."""
        if self.tolerance is not None and not item.is_integer_result and not self.is_all_rounding(item):
            return max(self.tolerance * item.scale, compute_rounding_errors(item))
        limit = max(get_noise_factor(item) * self.noise(item), compute_rounding_limit(item))
        if item.is_integer_result:
            flips = NOISE_FACTOR * self._relative.get(item.location.position, self._last_relative) * item.count
            if flips >= LIKELY_FLIP:
                limit = max(limit, math.ceil(min(flips, MOST_FLIPS * item.count)))
        return limit

    def relies_on_path(self, item: Difference) -> bool:
        """Whether a difference passes only by the rule for parameters whose gradients are all rounding."""
        return self.limit_of_noise(item) < item.size <= self.limit(item)

    def is_all_rounding(self, item: Difference) -> bool:
        """Whether the gradient of this parameter has been all rounding by now."""
        name = item.tensor.removeprefix("gradient of ")
        return self._all_rounding.get(name, math.inf) <= item.location.position

    @property
    def all_rounding(self) -> tuple[str, ...]:
        """The parameters whose gradients are all rounding, so the comparison says nothing about them."""
        return tuple(sorted(self._all_rounding))

    def relative_size(self, item: Difference) -> float:
        """Return the size relative to the tensor, if a tolerance applies to it; else 0.

        Single rounding errors are relative to the largest tensor of their kind, because their own tensor may be
        all rounding.
        """
        if item.is_integer_result or self.is_all_rounding(item) or item.size == 0:
            return 0.0
        if item.size <= compute_rounding_errors(item):
            return item.size / item.resolution * RESOLUTION[item.dtype]
        return item.size / item.scale if item.scale > 0 else math.inf


def compute_rounding_limit(item: Difference) -> float:
    """Return the largest difference that rounding alone explains, without training in between."""
    return max(ROUNDING_BOUND.get(item.dtype, 0.0) * item.scale, compute_rounding_errors(item))


def compute_rounding_errors(item: Difference) -> float:
    """Return the largest size of a tensor that is zero up to rounding."""
    errors = GRADIENT_ROUNDING_ERRORS if item.kind in ("gradient", "result") else ROUNDING_ERRORS
    return errors * item.resolution


def get_noise_factor(item: Difference) -> float:
    """Return by how much a difference may exceed the noise of a single run."""
    return NOISE_FACTOR_FLOAT64 if item.dtype in ("float64", "complex128") else NOISE_FACTOR


def is_rounding_gradient(item: Difference) -> bool:
    """Whether a gradient in the noise run consists of rounding errors only."""
    if item.kind != "gradient" or item.size <= ALL_ROUNDING * item.scale:
        return False
    return item.scale <= ALL_ROUNDING_ERRORS * item.resolution
