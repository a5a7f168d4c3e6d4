"""The counter-based generator: known answers, parts equal to the whole, and the distributions of its numbers."""

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from torch import Tensor

from rankless.compiler.ir import philox as philox_module
from rankless.compiler.ir.counter_distributions import draw
from rankless.compiler.ir.philox import MASK, philox

CPU = torch.device("cpu")
COUNT = 200_000
SMALLEST_P_VALUE = 1e-3
"""Below this a distribution test fails. Seeds are fixed, so a test that passes always passes."""

# The known answers are those of Random123, the authors' library (kat_vectors).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_answers_of_its_authors(counter, key, words):
    first, second = parse(key)
    found = philox([torch.full((70,), word) for word in parse(counter)], (first, second))
    for word, wanted in zip(found, parse(words), strict=True):
        assert word.tolist() == [wanted] * 70


def compute_reference(counter: list[int], key: list[int]) -> list[int]:
    """Return the words of a block by the definition in the paper, on Python's integers."""
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_philox_agrees_with_its_definition_on_many_blocks():
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    counter = [torch.randint(2**32, (50,), generator=generator) for _ in range(4)]
    key = torch.randint(2**32, (2,), generator=generator).tolist()
    before = [item.clone() for item in counter]
    found = torch.stack(philox(counter, (key[0], key[1])), 1).tolist()
    assert all(map(torch.equal, counter, before)), "the counter was changed"
    assert found == [compute_reference(block, key) for block in torch.stack(counter, 1).tolist()]


def test_the_lower_and_upper_half_of_key_and_element_number_count():
    sampler = philox_module.Sampler(4, torch.int64, lambda words: words)
    key, numbers = 0x0123456789ABCDEF, torch.tensor([5, 2**32 + 5])
    found = philox_module.draw_blocks(sampler, key, numbers).tolist()
    halves = [key & MASK, key >> 32]
    assert found == [compute_reference([5, 0, 0, 0], halves), compute_reference([5, 1, 0, 0], halves)]


DISTRIBUTIONS = {
    "normal": ((0.5, 2.0), torch.float32),
    "wide normal": ((0.5, 2.0), torch.float64),
    "half normal": ((0.5, 2.0), torch.float16),
    "complex normal": ((0.5, 2.0), torch.complex64),
    "uniform": ((-1.0, 3.0), torch.bfloat16),
    "wide uniform": ((-1.0, 3.0), torch.float64),
    "bernoulli": ((0.3,), torch.float32),
    "integers": ((3, 77), torch.int64),
    "exponential": ((0.5,), torch.float32),
    "cauchy": ((0.0, 1.0), torch.float32),
    "log_normal": ((0.0, 1.0), torch.float64),
    "geometric": ((0.2,), torch.int32),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(7, 5, 3), (8, 4, 4), (1, 9), (13,), (300, 202), (5, 1, 1, 9), (3, 0, 2), ()])
def test_a_part_has_the_bits_of_the_whole(name, shape):
    parameters, dtype = DISTRIBUTIONS[name]
    distribution = name.split()[-1]
    whole = draw(12345, distribution, parameters, (shape, dtype, CPU), ())
    assert whole.shape == shape
    assert whole.dtype == dtype
    for dim, size in enumerate(shape):
        for start, length in [(0, size), (0, 0), (0, size // 2), (size // 2, size - size // 2), (size // 3, size // 4)]:
            part = draw(12345, distribution, parameters, (shape, dtype, CPU), [(dim, start, length)])
            assert part.is_contiguous()
            assert torch.equal(part, whole.narrow(dim, start, length))


def test_a_part_of_a_tensor_of_many_chunks_has_the_bits_of_the_whole():
    rows = 3 * philox_module.CPU_CHUNK_BLOCKS // 4
    shape = (rows, 23)
    whole = draw(9, "normal", (0.0, 1.0), (shape, torch.float32, CPU), ())
    for dim, start, length in [(0, 1, 7), (0, rows // 2 + 1, rows // 2 - 1), (1, 5, 11), (1, 22, 1)]:
        part = draw(9, "normal", (0.0, 1.0), (shape, torch.float32, CPU), [(dim, start, length)])
        assert torch.equal(part, whole.narrow(dim, start, length))


def draw_many(distribution: str, *parameters: float, dtype: torch.dtype = torch.float32, key: int = 77) -> Tensor:
    return draw(key, distribution, parameters, ((COUNT,), dtype, CPU), ())


CONTINUOUS: dict[str, tuple[str, tuple[float, ...], Callable[..., float]]] = {
    "uniform": ("uniform", (-1.0, 3.0), scipy.stats.uniform(-1, 4).cdf),
    "normal": ("normal", (0.5, 2.0), scipy.stats.norm(0.5, 2).cdf),
    "exponential": ("exponential", (2.5,), scipy.stats.expon(scale=1 / 2.5).cdf),
    "cauchy": ("cauchy", (1.0, 2.0), scipy.stats.cauchy(1, 2).cdf),
    "log normal": ("log_normal", (0.1, 0.5), scipy.stats.lognorm(0.5, scale=math.exp(0.1)).cdf),
}


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_numbers_have_their_distribution(name, dtype):
    distribution, parameters, cdf = CONTINUOUS[name]
    drawn = draw_many(distribution, *parameters, dtype=dtype)
    assert scipy.stats.kstest(drawn.double().numpy(), cdf).pvalue > SMALLEST_P_VALUE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_and_normal_numbers_have_their_moments_in_every_dtype(dtype):
    uniform, normal = draw_many("uniform", 0.0, 1.0, dtype=dtype), draw_many("normal", 0.0, 1.0, dtype=dtype)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    # A number cut off at a step of 2**-8 is half a step too small on average.
    steps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
    standard_error = COUNT**-0.5
    assert abs(float(uniform.double().mean()) - 0.5 + steps / 2) < 4 * standard_error / math.sqrt(12)
    assert abs(float(uniform.double().var()) - 1 / 12) < 4 * standard_error * math.sqrt(1 / 180)
    assert abs(float(normal.double().mean())) < 4 * standard_error
    assert abs(float(normal.double().var()) - 1) < 4 * standard_error * math.sqrt(2) + 1e-4


def test_exponential_numbers_are_above_zero_and_their_logarithm_is_finite():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert draw_many("exponential", 1.0, dtype=dtype).log().isfinite().all()


@pytest.mark.parametrize("probability", [0.0, 1e-4, 0.1, 0.5, 0.9, 1.0])
def test_the_rate_of_ones_is_the_probability(probability):
    ones = int(draw_many("bernoulli", probability, dtype=torch.bool).sum())
    if probability in (0.0, 1.0):
        assert ones == probability * COUNT
    else:
        assert scipy.stats.binomtest(ones, COUNT, probability).pvalue > SMALLEST_P_VALUE


def test_probabilities_per_element_are_those_of_the_element():
    probabilities = torch.linspace(0, 1, 5).repeat(COUNT // 5)
    drawn = draw(3, "bernoulli", (probabilities,), ((COUNT,), torch.float32, CPU), ()).view(-1, 5).mean(0)
    assert drawn[0] == 0
    assert drawn[4] == 1
    assert (drawn - torch.linspace(0, 1, 5)).abs().max() < 4 * (0.25 / (COUNT / 5)) ** 0.5


@pytest.mark.parametrize(("low", "high"), [(0, 10), (-7, 4), (0, 2**40)])
def test_integers_are_equally_likely(low, high):
    drawn = draw(5, "integers", (low, high), ((COUNT,), torch.int64, CPU), ())
    assert low <= int(drawn.min()) <= int(drawn.max()) < high
    bins = min(high - low, 64)
    counts = torch.bincount((drawn - low) * bins // (high - low), minlength=bins)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > SMALLEST_P_VALUE


def test_integers_of_the_whole_range_use_all_bits():
    drawn = draw(5, "integers", (-(2**63), 2**63), ((COUNT,), torch.int64, CPU), ())
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert scipy.stats.binomtest(ones, COUNT, 0.5).pvalue > SMALLEST_P_VALUE / 64


def test_geometric_numbers_have_their_distribution():
    drawn = draw_many("geometric", 0.3, dtype=torch.int64)
    found = torch.bincount(drawn.clamp_max(12), minlength=13)[1:]
    wanted = [scipy.stats.geom(0.3).pmf(k) * COUNT for k in range(1, 12)]
    assert scipy.stats.chisquare(found.numpy(), [*wanted, COUNT - sum(wanted)]).pvalue > SMALLEST_P_VALUE


def test_bits_of_neighbours_and_of_consecutive_keys_are_independent():
    """Keys that differ in one bit, neighbouring elements, and all 32 bits of a word."""
    sampler = philox_module.Sampler(4, torch.int64, lambda words: words)
    words = [philox_module.draw_elements(sampler, key, (COUNT,), (), CPU) for key in (1, 2, 3, 1 + 2**32, 1 + 2**62)]
    limit = 5 * COUNT**-0.5
    pairs = [(words[0], other) for other in words[1:]] + [(words[0][:-lag], words[0][lag:]) for lag in (1, 2, 3, 4, 16)]
    for first, second in pairs:
        differing = first ^ second
        for bit in range(32):
            share = float(((differing >> bit) & 1).double().mean())
            assert abs(2 * share - 1) < limit, "correlated bits"


def test_normal_numbers_of_one_block_are_uncorrelated_and_reach_the_tails():
    for dtype, per_block in ((torch.float32, 4), (torch.float64, 2)):
        drawn = draw_many("normal", 0.0, 1.0, dtype=dtype).double().view(-1, per_block)
        for values in (drawn, drawn.square(), drawn.abs()):
            correlation = torch.corrcoef(values.t()) - torch.eye(per_block, dtype=torch.float64)
            assert float(correlation.abs().max()) < 5 * (COUNT / per_block) ** -0.5
        beyond = int((drawn.abs() > 4).sum())
        assert scipy.stats.binomtest(beyond, COUNT, 2 * scipy.stats.norm.sf(4)).pvalue > SMALLEST_P_VALUE
