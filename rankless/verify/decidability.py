"""Find where a comparison can no longer tell a fault from rounding.

Note [limits that hide faults]: the limit of a difference follows the noise, and noise grows as training amplifies
rounding. A limit that is a large part of what it limits passes any fault. A fault that the runs on one worker share
shows as noise too. So a comparison is decisive only as long as its limits are small:
  - for a result: 1 % of the largest value that this result has had;
  - for a gradient: 10 % of its norm;
  - for a parameter or buffer: 10 % of the length of its path, or 1 % of its norm if it has not moved.
A limit that rounding alone explains is never too high. In float64 neither is that of a difference which is itself one
of rounding: it hides nothing, whatever the noise. Parameters whose gradients are all rounding are left out. If those
are most of what trains, nothing is decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rankless.verify.differences import Difference
from rankless.verify.tolerance import NoiseFloor, compute_rounding_limit

RESULT_SHARE = 0.01
GRADIENT_SHARE = 0.1
PATH_SHARE = 0.1
STILL_SHARE = 0.01
SMALLEST_SHARE = 1e-6
"""Results and gradients below this fraction of the largest of their kind count as that fraction."""
MOST_ROUNDING = 0.5
"""The fraction of the trained elements from which on too many gradients are all rounding."""


@dataclass(frozen=True, kw_only=True)
class TooNoisy:
    """The first tensor whose limit is too high to find a fault."""

    step: int
    position: int
    tensor: str
    noise: float
    scale: float
    """What the noise is large beside: the value of a result, the norm of a gradient, the path of a parameter."""

    @property
    def reason(self) -> str:
        """Why nothing can be decided from here on, in one clause."""
        return (
            f"at step {self.step} the noise in {self.tensor} ({self.noise:.2g} of {self.scale:.2g}) could hide faults"
        )


def find_too_noisy(differences: Sequence[Difference], noise_floor: NoiseFloor) -> TooNoisy | None:
    """Return the first difference whose limit could hide a fault, in the order of the run."""
    largest_results: dict[str, float] = {}
    largest = 0.0
    for item in sorted(differences, key=lambda item: item.location.position):
        if item.is_integer_result or item.dtype == "text":
            continue
        if item.kind == "result":
            largest = max(largest, item.scale)
            largest_results[item.tensor] = max(largest_results.get(item.tensor, 0.0), item.scale)
            scale = max(largest_results[item.tensor], SMALLEST_SHARE * largest)
            highest = RESULT_SHARE * scale
        elif item.kind == "gradient":
            scale = max(item.scale, SMALLEST_SHARE * item.largest)
            highest = GRADIENT_SHARE * scale
        else:
            scale = item.path if item.path > 0 else item.scale
            highest = PATH_SHARE * item.path if item.path > 0 else STILL_SHARE * item.scale
        if noise_floor.is_all_rounding(item) or is_exact(item):
            continue
        if noise_floor.limit(item) > max(highest, compute_rounding_limit(item)):
            return TooNoisy(
                step=item.location.step,
                position=item.location.position,
                tensor=item.tensor,
                noise=noise_floor.noise(item),
                scale=scale,
            )
    return None


def is_exact(item: Difference) -> bool:
    """Whether a difference is one of rounding, by a bound so small that no noise matters."""
    return item.dtype in ("float64", "complex128") and item.size <= compute_rounding_limit(item)


def is_mostly_rounding(differences: Sequence[Difference], noise_floor: NoiseFloor) -> bool:
    """Whether the gradients of most trained elements are all rounding, so that little was compared."""
    gradients = {item.tensor: item.count for item in differences if item.kind == "gradient" and item.largest > 0}
    rounding = {f"gradient of {name}" for name in noise_floor.all_rounding}
    lost = sum(count for tensor, count in gradients.items() if tensor in rounding)
    return lost > MOST_ROUNDING * sum(gradients.values())
