"""Jobs whose features, classes, heads or rows of tables are divided between ranks, as tensor parallelism does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from simulated_ranks import Outcome, assert_runs_as_plain, run_on_simulated_axes
from torch import Tensor, nn

from rankless.parallel.tensor_placement import Placement, Replicate, Shard, Sharding, split_lengths

aten = torch.ops.aten
MINUS = -torch.inf


def make_random(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator(torch.get_default_device()).manual_seed(sum(shape))
    )


@dataclass(frozen=True)
class Case:
    """A job, and how its arguments are divided along the axes `tensor` and `data`: by a dim, or not at all."""

    function: Callable[..., Any]
    arguments: Sequence[Tensor]
    tensor: Sequence[int | None]
    data: Sequence[int | None]
    largest_share: float = 0.45
    """The size of the largest value that may be sent before the end, by that of the largest divided argument."""
    allows_empty: bool = True
    """Whether a rank may have nothing."""
    step: int = 1
    """The lengths of the largest divided dim are multiples of this."""
    bound: float = 1e-12


def divide(length: int, parts: int, kind: str) -> tuple[int, ...]:
    """Return ragged lengths; the first, the last or all ranks but one have nothing."""
    if kind == "uneven" or parts == 1:
        rest = split_lengths(length - 1, parts) if length > parts else split_lengths(length, parts)
        return (*rest[:-1], rest[-1] + length - sum(rest))
    if kind == "empty first":
        return (0, *split_lengths(length, parts - 1))
    if kind == "empty last":
        return (*split_lengths(length, parts - 1), 0)
    return (*(0,) * (parts - 2), length, 0)


def check(case: Case, axis_sizes: Sequence[int], kind: str) -> Outcome:
    """Run a job whose arguments are divided along the last axis, and along the first of two, and compare with plain.

    Each argument is multiplied by a parameter, so that its gradient is compared.
    """
    scales = nn.ParameterList()
    for item in case.arguments:
        if item.is_floating_point():
            scales.append(nn.Parameter(torch.linspace(0.5, 1.5, item.numel(), dtype=item.dtype).view(item.shape)))

    def job(*arguments: Tensor) -> Any:
        waiting = iter(scales)
        return case.function(*[item * next(waiting) if item.is_floating_point() else item for item in arguments])

    divided = [item for item, dim in zip(case.arguments, case.tensor, strict=True) if dim is not None]
    longest = max(item.shape[dim] for item, dim in zip(case.arguments, case.tensor, strict=True) if dim is not None)

    def place(shape: Sequence[int], tensor: int | None, data: int | None) -> Callable[[Sequence[int]], Sharding]:
        def sharding(_: Sequence[int]) -> Sharding:
            placements: list[Placement] = []
            if len(axis_sizes) == 2:
                rows = None if data is None else split_lengths(shape[data], axis_sizes[0])
                placements.append(Replicate() if data is None or rows is None else Shard(data, rows))
            if tensor is None:
                return (*placements, Replicate())
            step = case.step if shape[tensor] == longest else 1
            lengths = divide(shape[tensor] // step, axis_sizes[-1], kind)
            return (*placements, Shard(tensor, tuple(length * step for length in lengths)))

        return sharding

    shardings = [
        place(item.shape, tensor, data)
        for item, tensor, data in zip(case.arguments, case.tensor, case.data, strict=True)
    ]
    modules = {"scales": scales}
    outcome = assert_runs_as_plain(
        lambda: run_on_simulated_axes(job, modules, case.arguments, axis_sizes, shardings),
        job,
        modules,
        case.arguments,
        case.bound,
    )
    sent = [(item.bytes, item.kind, item.value) for item in outcome.local.collectives if item.purpose != "output"]
    most = max(item.numel() * item.element_size() for item in divided) * case.largest_share
    assert max(sent, default=(0,))[0] <= most, (most, sent)
    return outcome


def square(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a job with a loss that every value of a result has another part in."""

    def loss(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        found = function(*arguments)
        found = found[0] if isinstance(found, tuple) else found
        return (found * torch.arange(1, found.numel() + 1, dtype=found.dtype).view(found.shape).sin()).sum(), found

    return loss


FEATURES = 7
PRODUCTS = {
    "linear": Case(
        square(F.linear),
        [make_random(4, FEATURES), make_random(3, FEATURES), make_random(3)],
        (1, 1, None),
        (0, None, None),
    ),
    "linear over sequences": Case(
        square(F.linear),
        [make_random(4, 2, FEATURES), make_random(3, FEATURES), make_random(3)],
        (2, 1, None),
        (0, None, None),
    ),
    "linear with half of its inputs divided": Case(
        square(F.linear),
        [make_random(4, 2, FEATURES), make_random(3, FEATURES), make_random(3)],
        (2, None, None),
        (0, None, None),
    ),
    "linear of a vector": Case(
        square(F.linear), [make_random(FEATURES), make_random(3, FEATURES), make_random(3)], (0, 1, None), (None,) * 3
    ),
    "addmm": Case(
        square(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2)),
        [make_random(4, 3), make_random(4, FEATURES), make_random(FEATURES, 3)],
        (None, 1, 0),
        (0, 0, None),
    ),
    "addmm with a column": Case(
        square(torch.addmm),
        [make_random(4, 1), make_random(4, FEATURES), make_random(FEATURES, 3)],
        (None, 1, 0),
        (0, 0, None),
    ),
    "addmm with a number": Case(
        square(torch.addmm),
        [make_random(1)[0], make_random(4, FEATURES), make_random(FEATURES, 3)],
        (None, 1, 0),
        (None, 0, None),
    ),
    "baddbmm": Case(
        square(torch.baddbmm),
        [make_random(4, 1, 3), make_random(4, 2, FEATURES), make_random(4, FEATURES, 3)],
        (None, 2, 1),
        (0, 0, 0),
    ),
    "addmv": Case(
        square(torch.addmv),
        [make_random(4), make_random(4, FEATURES), make_random(FEATURES)],
        (None, 1, 0),
        (0, 0, None),
    ),
    "addbmm": Case(
        square(torch.addbmm),
        [make_random(4, 3), make_random(2, 4, FEATURES), make_random(2, FEATURES, 3)],
        (None, 2, 1),
        (0, 1, None),
    ),
    "convolution": Case(
        square(F.conv1d),
        [make_random(2, FEATURES, 4), make_random(3, FEATURES, 2), make_random(3)],
        (1, 1, None),
        (0, None, None),
        allows_empty=False,
    ),
    "transposed convolution": Case(
        square(F.conv_transpose1d),
        [make_random(2, FEATURES, 4), make_random(FEATURES, 3, 2), make_random(3)],
        (1, 0, None),
        (0, None, None),
        allows_empty=False,
    ),
}
TABLE = 41
WORDS = torch.tensor([[0, 15, 3], [3, 3, 40], [1, 40, 0], [15, 22, 7]])
TABLES = {
    "table": Case(square(F.embedding), [WORDS, make_random(TABLE, 5)], (None, 0), (0, None)),
    "table of int32": Case(square(F.embedding), [WORDS.int(), make_random(TABLE, 5)], (None, 0), (0, None)),
    "table by one index": Case(square(F.embedding), [torch.tensor(4), make_random(TABLE, 5)], (None, 0), (None, None)),
    "table by frequency": Case(
        square(lambda w, t: F.embedding(w, t, padding_idx=3, scale_grad_by_freq=True)),
        [WORDS, make_random(TABLE, 5)],
        (None, 0),
        (0, None),
    ),
    "no words": Case(square(F.embedding), [WORDS[:, :0], make_random(TABLE, 5)], (None, 0), (0, None)),
    "a table with numbers that are not finite": Case(
        square(lambda w, t: F.embedding(w, t.masked_fill(torch.arange(TABLE)[:, None] == 4, torch.inf))),
        [WORDS, make_random(TABLE, 5)],
        (None, 0),
        (0, None),
        largest_share=1.1,
    ),
    **{
        f"table padded at {padding}": Case(
            square(lambda w, t, padding=padding: F.embedding(w, t, padding_idx=padding)),
            [WORDS, make_random(TABLE, 5)],
            (None, 0),
            (0, None),
        )
        for padding in (0, 3, 15, 40, -1)
    },
}
CLASSES = 11
SCORES = make_random(4, CLASSES)
HOLES = SCORES.clone()
HOLES[0, 2:] = MINUS
HOLES[2, :9] = MINUS
NOTHING = HOLES.clone()
NOTHING[1] = MINUS


def safe_softmax(x: Tensor) -> Tensor:
    return aten._safe_softmax(x, -1)


SOFTMAX = {
    f"{function.__name__} {name}": Case(
        square(lambda *args, function=function, dim=dim: function(*args, dim)), [values], (dim % values.dim(),), (data,)
    )
    for function in (torch.softmax, torch.log_softmax)
    for name, values, dim, data in [
        ("of rows", SCORES, -1, 0),
        ("of columns", make_random(CLASSES, 4), 0, 1),
        ("of a dim between", make_random(2, CLASSES, 3), -2, 0),
        ("of a vector", make_random(CLASSES), 0, None),
        ("with holes", HOLES, 1, 0),
        ("of nothing", NOTHING, 1, 0),
        ("of not a number", torch.where(SCORES > 1.2, torch.nan, SCORES), 1, 0),
        ("of infinity", torch.where(SCORES > 1.2, torch.inf, SCORES), 1, 0),
        ("of large numbers", SCORES * 1e4, 1, 0),
        ("of another layout", make_random(CLASSES, 4).t(), 1, 0),
    ]
} | {
    "safe softmax": Case(square(safe_softmax), [SCORES], (1,), (0,)),
    "safe softmax with holes": Case(square(safe_softmax), [HOLES], (1,), (0,)),
}
TARGET = torch.tensor([0, 5, 10, 7])
WEIGHTS = make_random(CLASSES).abs() + 0.1
PICTURE, PIXELS = make_random(4, CLASSES, 2, 3), torch.arange(24).view(4, 2, 3) % CLASSES
ROW = make_random(CLASSES)


def entropy(**options: Any) -> Callable[..., Any]:
    """Return a job of cross entropy; the last of three arguments are class weights."""

    def loss(scores: Tensor, target: Tensor, *weight: Tensor) -> Any:
        found = F.cross_entropy(scores, target, weight[0].detach() if weight else None, **options)
        return (found.sum(), found) if found.dim() else found

    return loss


def nll_case(
    options: dict[str, Any], scores: Tensor = SCORES, target: Tensor = TARGET, weight: int | str = "none"
) -> Case:
    """Return a case of cross entropy; class weights are absent, whole or divided."""
    arguments, tensor, data = [scores, target], [1, None], [0, 0]
    if weight != "none":
        arguments, tensor, data = [*arguments, WEIGHTS], [1, None, 0 if weight == "divided" else None], [0, 0, None]
    if scores.dim() == 1:
        tensor[0], data = 0, [None] * len(arguments)
    return Case(entropy(**options), arguments, tensor, data)


REDUCTIONS = ("mean", "sum", "none")
LOSS_KINDS: dict[str, Callable[..., Case]] = {
    **{
        f"weights {weight}": lambda weight=weight, **options: nll_case(options, weight=weight)
        for weight in ("none", "whole", "divided")
    },
    **{
        f"ignored {ignored}": lambda ignored=ignored, **options: nll_case(
            options | {"ignore_index": ignored}, target=torch.where(TARGET == 5, ignored, TARGET), weight="whole"
        )
        for ignored in (-1, -100, 0, 10, 11, 300)
    },
    "all ignored": lambda **options: nll_case(options | {"ignore_index": 5}, target=torch.full((4,), 5)),
    "pictures": lambda **options: nll_case(options | {"ignore_index": 3}, PICTURE, PIXELS, "divided"),
    "sequences": lambda **options: nll_case(options | {"ignore_index": 3}, PICTURE[:, :, 0], PIXELS[:, 0], "whole"),
    "one row": lambda **options: nll_case(options, ROW, torch.tensor(6), "whole"),
    "one ignored row": lambda **options: nll_case(options | {"ignore_index": 6}, ROW, torch.tensor(6)),
    "holes": lambda **options: nll_case(options, HOLES, torch.tensor([0, 3, 9, 10])),
    "a target without probability": lambda **options: nll_case(options, HOLES),
    "equal targets": lambda **options: nll_case(options, target=torch.full((4,), 6)),
    **{
        f"smoothed, weights {weight}": lambda weight=weight, **options: nll_case(
            options | {"label_smoothing": 0.2, "ignore_index": 5}, weight=weight
        )
        for weight in ("none", "whole", "divided")
    },
    "smoothed pictures": lambda **options: nll_case(options | {"label_smoothing": 0.2}, PICTURE, PIXELS, "whole"),
}
LOSSES = {
    f"{reduction}, {name}": LOSS_KINDS[name](reduction=reduction) for name in LOSS_KINDS for reduction in REDUCTIONS
}
PROBABILITIES = {
    f"{reduction}, probabilities {place}": Case(
        entropy(reduction=reduction, label_smoothing=smoothing),
        [SCORES, make_random(4, CLASSES).softmax(1)],
        (1, 1 if place == "divided" else None),
        (0, 0),
    )
    for reduction in REDUCTIONS
    for place, smoothing in (("divided", 0.0), ("whole", 0.1))
}  # fmt: skip


def attend(**options: Any) -> Callable[..., Tensor]:
    """Return a job of attention. The gradient of a mask would need another kernel, so a mask is detached."""
    return square(
        lambda q, k, v, *mask: F.scaled_dot_product_attention(
            q, k, v, *(item.detach() for item in mask), enable_gqa=True, **options
        )
    )


def heads(count: int) -> Tensor:
    return make_random(2, count, 3, 4)


ATTENTION = {
    "equal heads": Case(attend(), [heads(4), heads(4) + 1, heads(4) - 1], (1, 1, 1), (0, 0, 0), allows_empty=False),
    "grouped heads": Case(
        attend(is_causal=True), [heads(8), heads(4), heads(4) + 1], (1, 1, 1), (0, 0, 0), allows_empty=False, step=2
    ),
    "grouped heads, queries divided": Case(
        attend(), [heads(8), heads(4), heads(4) + 1], (1, None, None), (0, 0, 0), allows_empty=False, step=2
    ),
    "grouped heads, keys divided": Case(
        attend(), [heads(12), heads(4), heads(4) + 1], (None, 1, None), (0, 0, 0), allows_empty=False
    ),
    "grouped heads with a mask": Case(
        attend(),
        [heads(8), heads(4), heads(4) + 1, make_random(2, 8, 3, 3)],
        (1, 1, 1, 1),
        (0, 0, 0, 0),
        allows_empty=False,
        step=2,
    ),
}
CASES = PRODUCTS | TABLES | SOFTMAX | LOSSES | PROBABILITIES | ATTENTION
