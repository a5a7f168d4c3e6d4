"""Draws of random tensors from the counter-based generator: the same numbers on any number of devices.

Note [a key for each random operator]: a call of a job with `random="counter"` seeds PyTorch's generator (see
`rankless.jobs.call_seed`). Each random operator takes a key of 63 bits from it, in program order. Equal seeds and equal
order give equal keys on every rank. Activation checkpointing restores the generator before it computes a forward pass
again, so the second pass gets the keys of the first. An operator without elements takes no key.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.ir.memory_order import order_memory
from rankless.compiler.ir.philox import Sampler, draw_elements
from rankless.compiler.ir.tensor_parts import Part

Words = Sequence[Tensor]
Parameters = Sequence[Any]

KEY_LIMIT = 2**63
HALF_DTYPES = {torch.float16: 11, torch.bfloat16: 8}
"""Half precision and its binary digits: a uniform number of so many digits stays below 1."""
REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def draw_key(shape: Sequence[int]) -> int:
    """Return the key of the next random operator; see Note [a key for each random operator].

    Args:
        shape: The shape of the logical tensor that it draws.
    """
    if math.prod(shape) == 0:
        return 0
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator).item())


def draw(
    key: int,
    distribution: str,
    parameters: Parameters,
    value: tuple[Sequence[int], torch.dtype, torch.device],
    parts: Sequence[Part],
    order: Sequence[int] | None = None,
) -> Tensor:
    """Return a rank's part of a random logical tensor.

    Args:
        key: The key of the operator.
        distribution: A name in `DISTRIBUTIONS`.
        parameters: The parameters of the distribution. A tensor has the shape of the part, or broadcasts to it.
        value: Shape, dtype and device of the logical tensor.
        parts: The part, as ranges of different dims; none for the whole.
        order: The order of the dims in memory; None for contiguous memory.
    """
    shape, dtype, device = value
    if dtype.is_complex:
        real = draw_complex_parts(key, distribution, parameters, value, parts)
        drawn = torch.view_as_complex(real)
    else:
        drawn = DISTRIBUTIONS[distribution](
            lambda sampler: draw_elements(sampler, key, shape, parts, device), dtype, *parameters
        )
    return drawn if order is None else order_memory(drawn, order)


def draw_complex_parts(
    key: int,
    distribution: str,
    parameters: Parameters,
    value: tuple[Sequence[int], torch.dtype, torch.device],
    parts: Sequence[Part],
) -> Tensor:
    """Return real and imaginary parts, along a last dim of size 2, as PyTorch defines them."""
    shape, dtype, device = value
    if distribution == "normal":
        mean, deviation = parameters
        parameters = (mean, deviation / math.sqrt(2))
    elif distribution != "uniform":
        raise RuntimeError(f"{distribution} is not defined for {dtype}")
    return draw(key, distribution, parameters, ((*shape, 2), REAL_DTYPES[dtype], device), parts)


Draw = Callable[[Sampler], Tensor]
"""Draws the samples of the elements at hand."""


def draw_bernoulli(draw_samples: Draw, dtype: torch.dtype, probability: float | Tensor) -> Tensor:
    """Return ones with the given probability, to 2**-32, and zeros."""
    if isinstance(probability, Tensor):
        if probability.device.type == "cpu":
            require(bool(((probability >= 0) & (probability <= 1)).all()), "probabilities from 0 to 1")
        uniform = draw_samples(Sampler(4, torch.float64, lambda words: [word.double() * 2.0**-32 for word in words]))
        return (uniform < probability).to(dtype)
    require(0 <= probability <= 1, f"a probability from 0 to 1, not {probability}")
    limit = round(probability * 2**32)
    return draw_samples(Sampler(4, torch.bool, lambda words: [word < limit for word in words])).to(dtype)


def draw_uniform(draw_samples: Draw, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Return numbers from `low` up to, but without, `high`, with all digits of the dtype."""
    require(low <= high, f"a range, not from {low} to {high}")
    if dtype == torch.float64:
        unit = draw_samples(Sampler(2, dtype, lambda words: [digits * 2.0**-53 for digits in join_words(words, 53)]))
    else:
        digits = HALF_DTYPES.get(dtype, 24)
        unit = draw_samples(
            Sampler(4, torch.float32, lambda words: [(word >> (32 - digits)).float() * 2.0**-digits for word in words])
        )
    return unit.mul_(high - low).add_(low).to(dtype)


def draw_normal(draw_samples: Draw, dtype: torch.dtype, mean: float | Tensor, deviation: float | Tensor) -> Tensor:
    """Return normal numbers by the method of Box and Muller (1958)."""
    if isinstance(deviation, Tensor):
        if deviation.device.type == "cpu":
            require(bool((deviation >= 0).all()), "standard deviations from 0 up")
    else:
        require(deviation >= 0, f"a standard deviation from 0 up, not {deviation}")
    wide = dtype == torch.float64
    drawn = draw_samples(Sampler(2, torch.float64, convert_wide_normals) if wide else FLOAT_NORMALS)
    return drawn.mul(deviation).add(mean).to(dtype)


def convert_wide_normals(words: Words) -> list[Tensor]:
    """Return two normal numbers of double precision per block."""
    first, second = join_words(words, 53)
    return transform_pair((first + 1) * 2.0**-53, second * 2.0**-53)


def convert_normals(words: Words) -> list[Tensor]:
    """Return four normal numbers of single precision per block."""
    first, second, third, fourth = words
    return [
        *transform_pair((first + 1).float() * 2.0**-32, second.float() * 2.0**-32),
        *transform_pair((third + 1).float() * 2.0**-32, fourth.float() * 2.0**-32),
    ]


def transform_pair(radius: Tensor, angle: Tensor) -> list[Tensor]:
    """Return two normal numbers for each pair of uniform ones, the first above 0 and up to 1."""
    radius = radius.log_().mul_(-2).sqrt_()
    angle = angle.mul_(2 * math.pi)
    return [radius * angle.cos(), radius * angle.sin()]


FLOAT_NORMALS = Sampler(4, torch.float32, convert_normals)


def draw_integers(draw_samples: Draw, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Return integers from `low` up to, but without, `high`; their bias is below (high - low) / 2**63."""
    require(low < high, f"integers from {low} below {high}, of which there are none")
    count = high - low

    def convert(words: Words) -> list[Tensor]:
        pairs = [(words[0], words[1]), (words[2], words[3])]
        if count > KEY_LIMIT:
            return [(upper << 32) | lower for upper, lower in pairs]
        return [
            (((upper & 0x7FFFFFFF) << 32) | lower).remainder_(count).add_(low)
            if count < KEY_LIMIT
            else (((upper & 0x7FFFFFFF) << 32) | lower).add_(low)
            for upper, lower in pairs
        ]

    return draw_samples(Sampler(2, torch.int64, convert)).to(dtype)


def join_words(words: Words, digits: int) -> list[Tensor]:
    """Return two float64 integers of `digits` binary digits per block."""
    return [((words[place] << (digits - 32)) | (words[place + 1] >> (64 - digits))).double() for place in (0, 2)]


def sample_open_uniform(transform: Callable[[Tensor], Tensor]) -> Sampler:
    """Return a sampler of a function of a number strictly between 0 and 1, in float64."""
    return Sampler(
        2,
        torch.float64,
        lambda words: [transform((digits + 0.5) * 2.0**-52) for digits in join_words(words, 52)],
    )


def draw_exponential(draw_samples: Draw, dtype: torch.dtype, rate: float) -> Tensor:
    """Return numbers above 0, as PyTorch's are: their logarithm is finite."""
    require(rate > 0, f"a rate above 0, not {rate}")
    drawn = draw_samples(sample_open_uniform(lambda unit: unit.neg_().log1p_().div_(-rate)))
    return drawn.to(dtype).clamp_min_(torch.finfo(dtype).tiny)


def draw_geometric(draw_samples: Draw, dtype: torch.dtype, probability: float) -> Tensor:
    """Return the number of trials up to the first success."""
    require(0 < probability < 1, f"a probability above 0 and below 1, not {probability}")
    divisor = math.log1p(-probability)
    return draw_samples(sample_open_uniform(lambda unit: unit.log_().div_(divisor).ceil_())).clamp_min_(1).to(dtype)


def draw_cauchy(draw_samples: Draw, dtype: torch.dtype, median: float, scale: float) -> Tensor:
    """Return Cauchy numbers."""
    require(scale > 0, f"a scale above 0, not {scale}")
    sampler = sample_open_uniform(lambda unit: unit.sub_(0.5).mul_(math.pi).tan_().mul_(scale).add_(median))
    return draw_samples(sampler).to(dtype)


def draw_log_normal(draw_samples: Draw, dtype: torch.dtype, mean: float, deviation: float) -> Tensor:
    """Return numbers whose logarithm is normal."""
    require(deviation > 0, f"a standard deviation above 0, not {deviation}")
    sampler = Sampler(
        2,
        torch.float64,
        lambda words: [item.mul_(deviation).add_(mean).exp_() for item in convert_wide_normals(words)],
    )
    return draw_samples(sampler).to(dtype)


DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {
    "bernoulli": draw_bernoulli,
    "uniform": draw_uniform,
    "normal": draw_normal,
    "integers": draw_integers,
    "exponential": draw_exponential,
    "geometric": draw_geometric,
    "cauchy": draw_cauchy,
    "log_normal": draw_log_normal,
}


def require(holds: bool, expected: str) -> None:
    """Raise `RuntimeError`, as PyTorch's random operators do, for parameters that a distribution does not have."""
    if not holds:
        raise RuntimeError(f"expected {expected}")
