"""Functions that one rank runs where an operator alone does not suffice: merged statistics, logical draws, slices.

Lowered programs call these plain functions on local tensors, below autograd. They are in no logical graph. Those on
blocks are for Note [dims of several blocks].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.ir.tensor_parts import Part, take_parts
from rankless.parallel.default_generator import find_default_generator

aten = torch.ops.aten

ADVANCE_CHUNK = 2**15
"""Numbers that are drawn at once only to advance a generator: they stay in the processor's cache."""


def slice_dim(value: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return rows `start` to `start + length` of a dim: a view if they lie together in memory, else a copy.

    Some kernels of PyTorch ignore the strides of values that they have computed themselves, such as the means and
    deviations of a norm, which always lie together then.
    """
    part = value.narrow(dim, start, length)
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    is_together = not strides or min(strides) == 0 or value.stride(dim) == max(strides)
    return part if is_together else part.clone()


def find_places(mask: Tensor, starts: Sequence[int]) -> Tensor:
    """Return the places of what is not zero, one row for each, counted from these starts of the dims."""
    places = mask.nonzero()
    return places + torch.tensor(starts, dtype=torch.int64, device=mask.device)


def count_places(mask: Tensor) -> int:
    """Return the number of what is not zero."""
    return int(mask.count_nonzero())


def find_owners(mask: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return, for each place of what is not zero, the rank whose part it is in, if a dim is divided."""
    ends = torch.tensor(lengths, dtype=torch.int64, device=mask.device).cumsum(0)
    return torch.searchsorted(ends, mask.nonzero()[:, dim].contiguous(), right=True)


def restore_order(value: Tensor, dim: int, owners: Tensor) -> Tensor:
    """Return gathered parts of selected rows in the order of one device, given the rank that each row is from."""
    return value.index_select(dim, owners.argsort(stable=True).argsort())


def take_own_rows(value: Tensor, dim: int, owners: Tensor, rank: int) -> Tensor:
    """Return those of all selected rows that are in the part of a rank."""
    return value.index_select(dim, (owners == rank).nonzero().flatten())


def keep_on_rank_zero(value: Tensor, rank: int) -> Tensor:
    """Return a replicated value as a partial sum: rank 0 keeps the value, the other ranks hold zeros."""
    return value if rank == 0 else torch.zeros_like(value)


def make_absent(like: Tensor) -> Tensor:
    """Return what a rank holds in place of a value that another rank has: a tensor of its kind without rows."""
    return like.new_empty((0, *like.shape[1:]) if like.dim() else ())


def make_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a shape without rows, for a value that another rank computes."""
    return torch.empty(shape, dtype=dtype, device=device)


def make_empty_from(
    _inputs: Sequence[Tensor],
    shape: Sequence[int],
    _present: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a tensor of a shape without rows, for a value of another rank, which computes it from such inputs.

    Args:
        _inputs: What this rank has of them.
        shape: The shape.
        _present: The shape of the value where it is.
        dtype: Its dtype.
        device: Its device.
    """
    return make_empty(shape, dtype, device)


def make_zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a rank's term of a sum that another rank has: zeros of this shape."""
    return like.new_zeros(shape)


def draw_and_slice(
    operator: Callable[..., Tensor],
    example: tuple[Sequence[int], Sequence[int], torch.dtype],
    device: torch.device,
    arguments: Sequence[Any],
    parts: Sequence[Part],
) -> Tensor:
    """Draw a random operator for the logical value in its memory order, and return this rank's part.

    The generator advances on every rank as in the plain script, so the numbers are those of the plain script.
    """
    shape, strides, dtype = example
    value = operator(torch.empty_strided(shape, strides, dtype=dtype, device=device), *arguments)
    return take_parts(value, parts)


@dataclass(frozen=True, eq=False)
class GeneratorStart:
    """The state of a forked generator before its first draw.

    Args:
        seed: The seed that the job gives to it, or None.
        parent: The generator that it is a fork of, without a seed. None for PyTorch's own.
    """

    seed: int | None = None
    parent: torch.Generator | None = None

    def apply(self, generator: torch.Generator, default: torch.Generator) -> None:
        """Set the state of a generator, given PyTorch's own."""
        if self.seed is not None:
            generator.manual_seed(self.seed)
        else:
            generator.set_state((default if self.parent is None else self.parent).get_state())


@dataclass(frozen=True, eq=False)
class DrawFrom:
    """A function whose random operators draw from a generator of the script, and not from PyTorch's own."""

    generator: torch.Generator
    function: Callable[..., Any]
    start: GeneratorStart | None = None
    """How the generator gets its state first; see Note [forked generators]."""

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "draw")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function while PyTorch's generator has the state of the script's, which then gets the new state."""
        self.begin()
        return self.draw(*args, **kwargs)

    def begin(self) -> None:
        """Give a forked generator its state before the first draw from it."""
        if self.start is not None:
            self.start.apply(self.generator, find_default_generator(self.generator.device))

    def draw(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function from the present state of the generator."""
        default = find_default_generator(self.generator.device)
        if self.generator is default:
            return self.function(*args, **kwargs)
        before = default.get_state()
        default.set_state(self.generator.get_state())
        try:
            result = self.function(*args, **kwargs)
            self.generator.set_state(default.get_state())
        finally:
            default.set_state(before)
        return result


def apply_dropout(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Apply dropout with a mask of the elements to keep."""
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return x.mul(mask).mul_(scale)


def draw_dropout_mask(
    example: tuple[Sequence[int], Sequence[int], torch.dtype],
    device: torch.device,
    probability: float,
    parts: Sequence[Part],
) -> Tensor:
    """Draw a rank's part of the mask of kept elements, as `torch.nn.functional.dropout` does on this device."""
    shape, strides, dtype = example
    like = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if probability == 1:
        # Dropout drops everything, and PyTorch draws no random numbers.
        return take_parts(torch.zeros_like(like, dtype=torch.bool), parts)
    if device.type != "cpu":
        return take_parts(aten.native_dropout.default(like, probability, True)[1], parts)
    mask = torch.empty_like(like, dtype=torch.bool)
    if len(parts) != 1 or not is_outermost(mask, parts[0][0]):
        return take_parts(mask.bernoulli_(1 - probability), parts)
    dim, start, length = parts[0]
    row = mask.numel() // mask.shape[dim]
    advance_generator(start * row)
    part = torch.empty_like(mask.narrow(dim, start, length)).bernoulli_(1 - probability)
    advance_generator((mask.shape[dim] - start - length) * row)
    return part


def is_outermost(value: Tensor, dim: int) -> bool:
    """Return whether the rows of a dim follow each other in a value's memory, which has no gaps."""
    others = [other for other in range(value.dim()) if other != dim and value.shape[other] != 1]
    return value.numel() > 0 and all(value.stride(dim) >= value.stride(other) * value.shape[other] for other in others)


def advance_generator(count: int) -> None:
    """Advance PyTorch's generator as so many Bernoulli draws on a CPU do, in little more than half of their time.

    Each takes 64 random bits, as a random integer of 64 bits does.
    """
    scratch = torch.empty(min(count, ADVANCE_CHUNK), dtype=torch.int64, device="cpu")
    for begin in range(0, count, ADVANCE_CHUNK):
        scratch[: count - begin].random_()


# Note [merged moments]: each rank computes mean and variance of its own rows. One all-gather collects them, and the
# formula of Chan, Golub and LeVeque (1979) merges them with the counts as weights. Unlike sums of squares, this
# loses no digits.


def channel_moments(x: Tensor) -> Tensor:
    """Return mean and biased variance per channel (dim 1), stacked: shape (2, channels)."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if x.numel() == 0:
        return wide.new_zeros((2, x.shape[1]))  # its weight among the ranks is zero
    # The kernel with which PyTorch's own batch norm begins: `var_mean` takes five times as long.
    return torch.stack(aten.batch_norm_update_stats.default(wide, None, None, 0.0))


def merge_moments(gathered: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Merge every rank's moments into mean and biased variance per channel of all rows.

    `gathered` has shape (ranks, 2, channels); `counts` holds every rank's number of rows.
    """
    total = sum(counts)
    weights = torch.tensor([count / total for count in counts], dtype=gathered.dtype, device=gathered.device)
    means, variances = gathered[:, 0], gathered[:, 1]
    mean = weights @ means
    return mean, weights @ (variances + (means - mean) ** 2)


def batch_norm(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    gathered: Tensor,
    settings: tuple[Sequence[int], float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Normalize with the statistics of all ranks.

    Return output, mean, reciprocal deviation, and the new running mean and variance. `settings` is (every rank's number
    of values per channel, momentum, epsilon). Ioffe and Szegedy, 2015.
    """
    counts, momentum, epsilon = settings
    mean, variance = merge_moments(gathered, counts)
    if x.numel() == 0:
        output = torch.empty_like(x)  # PyTorch's kernel for GPUs raises
    else:
        output = aten.native_batch_norm.default(x, *affine, mean, variance, False, 0.0, epsilon)[0]
    reciprocal = torch.rsqrt(variance + epsilon)
    running_mean, running_variance = running
    if running_mean is None or running_variance is None:
        return output, mean, reciprocal, running_mean, running_variance
    total = sum(counts)
    unbiased = variance * (total / (total - 1)) if total > 1 else variance
    return (
        output,
        mean,
        reciprocal,
        (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype),
        (running_variance * (1 - momentum) + unbiased * momentum).to(running_variance.dtype),
    )


def batch_norm_local_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, reciprocal: Tensor
) -> tuple[Tensor, Tensor]:
    """Return this rank's contribution to the gradients of batch norm.

    The first value is the gradient of x as if the statistics were constants. The second, shape (2, channels), holds the
    sums per channel of grad * normalized x and of grad.
    """
    if x.numel() == 0:
        return torch.zeros_like(x), mean.new_zeros((2, x.shape[1]))  # PyTorch's kernel would end the process
    variance = reciprocal**-2
    if weight is None:
        weight = torch.ones_like(mean)  # without, PyTorch's kernel for GPUs may not return the sums
    direct, by_weight, by_bias = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, variance, mean, reciprocal, False, 0.0, [True, True, True]
    )
    return direct, torch.stack([by_weight, by_bias])


def batch_norm_input_gradient(
    direct: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: tuple[Tensor, Tensor, Tensor],
    count: int,
) -> Tensor:
    """Add the statistics' share to the gradient of x.

    The result is direct - weight * r / count * (sum(g) + xhat * sum(g * xhat)).
    """
    sums, mean, reciprocal = statistics
    scale = reciprocal / count if weight is None else weight * reciprocal / count
    slope = scale * sums[0] * reciprocal
    shape = [1, -1] + [1] * (x.dim() - 2)
    offset = (scale * sums[1] - slope * mean).to(x.dtype).view(shape)
    return direct.sub_(offset).addcmul_(x, slope.to(x.dtype).view(shape), value=-1)


def reduce_extremum(gathered: Tensor, name: str) -> Tensor:
    """Return the maximum or minimum over ranks; unlike a reduction's, it keeps NaN."""
    return gathered.amax(0) if name == "max" else gathered.amin(0)


def slice_blocks(value: Tensor, dim: int, block: int, start: int, length: int) -> Tensor:
    """Return rows `start` to `start + length` of each block of a dim, one block after the other.

    Args:
        value: A tensor whose `dim` consists of blocks.
        dim: The dim.
        block: The number of rows of a block.
        start: The first row, counted within a block.
        length: The number of rows of a block to take.
    """
    apart: Tensor = value.unflatten(dim, (-1, block))
    return apart.narrow(dim + 1, start, length).flatten(dim, dim + 1)


def join_blocks(gathered: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return a whole value from the pieces of all ranks, one after the other along a dim.

    Args:
        gathered: The pieces.
        dim: The dim.
        lengths: The rows that each rank has of one block.
    """
    blocks = gathered.shape[dim] // sum(lengths)
    pieces = gathered.split([blocks * length for length in lengths], dim)
    apart = [piece.unflatten(dim, (blocks, length)) for piece, length in zip(pieces, lengths, strict=True)]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 1)
