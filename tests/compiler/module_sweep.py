"""Each class of `torch.nn` in train and eval mode, with and without gradients and autocast, against eager PyTorch.

The arguments are those of PyTorch's database of modules, and our own for the classes that it lacks.
"""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from operator_database import SEED, DatabaseCase, Scales, Split, set_layout, weigh
from operator_outcomes import (
    CapturedCase,
    Division,
    NoOracle,
    compare,
    describe_error,
    describe_refusal,
    find_difference,
    run_eagerly,
)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import split_lengths

MAX_SAMPLES = 3
MAX_ATTENTION_SAMPLES = 12
"""Of modules whose mode and masks decide what they compute."""
ATTENTION = ("Transformer", "Attention")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def count(*shape: int, below: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


Sample = tuple[Callable[..., nn.Module], tuple[Any, ...]]
"""A constructor, and the arguments of a call."""
OWN: dict[str, list[Sample]] = {
    "AdaptiveLogSoftmaxWithLoss": [
        (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6]), (normal(5, 4), count(5, below=10)))
    ],
    "AlphaDropout": [(lambda: nn.AlphaDropout(0.4), (normal(4, 3),))],
    "ChannelShuffle": [(lambda: nn.ChannelShuffle(2), (normal(4, 6, 3, 3),))],
    "CosineSimilarity": [(lambda: nn.CosineSimilarity(), (normal(4, 3), normal(4, 3)))],
    "CrossMapLRN2d": [(lambda: nn.CrossMapLRN2d(2), (normal(4, 5, 3, 3),))],
    "Dropout": [(lambda: nn.Dropout(0.4), (normal(4, 3),)), (lambda: nn.Dropout(1.0), (normal(4, 3),))],
    "Dropout1d": [(lambda: nn.Dropout1d(0.4), (normal(4, 3, 5),))],
    "Dropout2d": [(lambda: nn.Dropout2d(0.4), (normal(4, 3, 5, 5),))],
    "Dropout3d": [(lambda: nn.Dropout3d(0.4), (normal(4, 3, 2, 2, 2),))],
    "EmbeddingBag": [
        (lambda: nn.EmbeddingBag(9, 3), (count(4, 5, below=9),)),
        (lambda: nn.EmbeddingBag(9, 3, mode="max", padding_idx=0), (count(4, 5, below=9),)),
        (lambda: nn.EmbeddingBag(9, 3, mode="sum"), (count(8, below=9), torch.tensor([0, 2, 2, 5]), normal(8))),
    ],
    "FeatureAlphaDropout": [(lambda: nn.FeatureAlphaDropout(0.4), (normal(4, 3, 5),))],
    "Flatten": [(lambda: nn.Flatten(), (normal(4, 3, 5),))],
    "Fold": [(lambda: nn.Fold((4, 5), (2, 2)), (normal(3, 8, 12),))],
    "Hardsigmoid": [(lambda: nn.Hardsigmoid(), (normal(4, 3) * 3,))],
    "Identity": [(lambda: nn.Identity(), (normal(4, 3),))],
    "MaxUnpool2d": [(lambda: nn.MaxUnpool2d(2), nn.functional.max_pool2d(normal(3, 2, 4, 4), 2, return_indices=True))],
    "PairwiseDistance": [(lambda: nn.PairwiseDistance(), (normal(4, 3), normal(4, 3) + 1))],
    "PixelShuffle": [(lambda: nn.PixelShuffle(2), (normal(3, 8, 2, 2),))],
    "PixelUnshuffle": [(lambda: nn.PixelUnshuffle(2), (normal(3, 2, 4, 4),))],
    "RReLU": [(lambda: nn.RReLU(), (normal(4, 3),))],
    "TransformerDecoder": [
        (
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 6, batch_first=True), 2),
            (normal(3, 5, 4), normal(3, 6, 4)),
        ),
    ],
    "TripletMarginLoss": [(lambda: nn.TripletMarginLoss(), (normal(4, 3), normal(4, 3) + 1, normal(4, 3) - 1))],
    "TripletMarginWithDistanceLoss": [
        (lambda: nn.TripletMarginWithDistanceLoss(), (normal(4, 3), normal(4, 3) + 1, normal(4, 3) - 1))
    ],
    "Unflatten": [(lambda: nn.Unflatten(1, (2, 3)), (normal(4, 6),))],
    "Unfold": [(lambda: nn.Unfold((2, 2)), (normal(3, 2, 4, 5),))],
    "Upsample": [
        (lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), (normal(3, 2, 4, 5),))
        for mode in ("nearest", "bilinear", "bicubic")
    ],
}
BASES = {
    *("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "RNNBase", "RNNCellBase"),
    *("Sequential", "DataParallel"),
}
"""Classes that compute nothing themselves, and the one that is another way to use several devices."""
SAME_AS = {"NLLLoss2d", "UpsamplingBilinear2d", "UpsamplingNearest2d", "MaxUnpool1d", "MaxUnpool3d", "LazyLinear"} | {
    f"Lazy{kind}Norm{dims}d" for kind in ("Batch", "Instance") for dims in (1, 2, 3)
}
"""Classes that are others once they are initialized, or with another number of dims."""
NEEDS_GROUP = {"SyncBatchNorm"}


@functools.cache
def database() -> dict[str, Any]:
    """Return PyTorch's database by the names of classes. Only tests that read it import it: that takes seconds."""
    found = importlib.import_module("torch.testing._internal.common_modules").module_db
    return {info.name.removeprefix("nn."): info for info in found}


def modules() -> list[str]:
    """Return the names of the classes that are swept."""
    return sorted({*database(), *OWN})


@dataclass(frozen=True)
class ModuleCase(DatabaseCase):
    """A module with one set of arguments, as a job that can be captured; `function` is the module."""

    training: bool = False
    autocast: bool = False

    def __str__(self) -> str:
        words = ["train" if self.training else "eval", self.mode, *(["autocast"] if self.autocast else [])]
        return f"{self.variant}, {', '.join(words)}, sample {self.number}: {self.describe()}"

    @cached_property
    def scales(self) -> Scales:
        """The factors of the arguments, with the module among them."""
        scales = Scales(self.tensors, self.differentiable)
        scales.add_module("inner", self.function)
        return scales

    @property
    def computing_dtypes(self) -> set[torch.dtype]:
        """The types in which values are rounded."""
        return super().computing_dtypes | ({torch.bfloat16} if self.autocast else set())

    def job(self, *tensors: Tensor) -> Any:
        """Run the module as the function of a job does."""
        with nullcontext() if self.trains else torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
                results = self.call(self.scales(tensors))
            return (weigh(results, "contiguous"), *results) if self.trains else results

    def splits(self) -> Iterator[Split]:
        """Yield the divisions: of the first tensor's first dims, with all tensors of equal sizes."""
        for dim, size in enumerate(self.tensors[0].shape[:2]):
            if size >= 2:
                yield Split(
                    tuple(dim if item.dim() > dim and item.shape[dim] == size else None for item in self.tensors)
                )


def samples_of(name: str, training: bool, dtype: torch.dtype) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict]]:
    """Yield modules with the arguments of a call."""
    if name in OWN:
        for build, arguments in OWN[name]:
            moved = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, arguments)
            yield build().to(dtype), moved, {}
        return
    info = database()[name]
    given = list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training))
    limit = MAX_ATTENTION_SAMPLES if any(word in name for word in ATTENTION) else MAX_SAMPLES
    if len(given) > limit:
        given = [given[place * (len(given) - 1) // (limit - 1)] for place in range(limit)]
    for item in given:
        constructed = item.constructor_input
        options = {"dtype": dtype, "device": "cpu"} if takes_dtype(info.module_cls) else {}
        module = info.module_cls(*constructed.args, **(constructed.kwargs | options))
        called = item.forward_input
        if called is not None:
            yield module.to(dtype), called.args, dict(called.kwargs)


def takes_dtype(kind: type[nn.Module]) -> bool:
    """Return whether a module makes parameters in a dtype."""
    return "dtype" in kind.__init__.__code__.co_varnames


def cases_of(name: str) -> Iterator[Callable[[], ModuleCase]]:
    """Yield functions that make the cases of a module: equal ones, with modules of their own, at each call."""
    for training in (True, False):
        for autocast in (False, True):
            dtype = torch.float32 if autocast else torch.float64
            torch.manual_seed(SEED)
            for number, _ in enumerate(samples_of(name, training, dtype)):
                for mode in ("backward", "forward"):
                    yield lambda place=(training, autocast, dtype, number, mode): make_case(name, *place)


def make_case(name: str, training: bool, autocast: bool, dtype: torch.dtype, number: int, mode: str) -> ModuleCase:
    """Return a case, the same at each call."""
    torch.manual_seed(SEED)
    module, args, kwargs = [*samples_of(name, training, dtype)][number]
    module.train(training)
    tensors = pytree.tree_map_only(Tensor, lambda item: set_layout(item, "contiguous"), (*args, kwargs))
    if any(isinstance(item, nn.UninitializedParameter) for item in module.parameters()):
        torch.manual_seed(SEED)
        module(*tensors[:-1], **tensors[-1])
    leaves, spec = pytree.tree_flatten((tensors[0], tuple(tensors[1:-1]), tensors[-1]))
    return ModuleCase(
        name, dtype, "contiguous", mode, number, tuple(leaves), spec, module, training=training, autocast=autocast
    )


@dataclass
class SweepCounts:
    """The outcomes of the cases of a module."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, text: str = "") -> None:
        """Count an outcome; text for one that is a fault."""
        self.kinds[kind] += 1
        if text:
            self.failures.append(f"{kind}: {text}")


def sweep(cases: Iterator[Callable[[], ModuleCase]]) -> SweepCounts:
    """Run cases and compare each with eager PyTorch: values, dtypes, shapes, strides, gradients and buffers."""
    counts = SweepCounts()
    for make in cases:
        plain = make()
        try:
            expected = run_eagerly(plain)
        except NoOracle:
            counts.add("fails in eager PyTorch")
            continue
        case = make()
        try:
            captured = CapturedCase(case)
        except CaptureError as error:
            counts.add("refused", "" if error.where or error.found else f"{case}: {describe_refusal(error)}")
            continue
        except Exception as error:
            counts.add("crashed", f"{case}: {describe_error(error)}")
            continue
        for division in divisions_of(case):
            try:
                outcome = captured.run(division)
            except CaptureError:
                counts.add("refused")
                continue
            except Exception as error:
                counts.add("crashed", f"{case}; {division}: {describe_error(error)}")
                continue
            result = compare(case, expected, outcome)
            problem = result.reason if result.kind == "wrong" else find_wrong_buffer(plain, case, outcome.mutations)
            problem = problem or find_wrong_strides(expected.results, outcome.results, case.trains)
            counts.add("wrong" if problem else "right", f"{case}; {division}: {problem}" if problem else "")
    return counts


def divisions_of(case: ModuleCase) -> list[Division]:
    """Return the divisions of a case: for two ranks, unevenly."""
    found = []
    for split in case.splits():
        size = next(item.shape[dim] for item, dim in zip(case.tensors, split.dims, strict=True) if dim is not None)
        lengths = (1, size - 1) if size > 2 else split_lengths(size, 2)
        found.append(Division(split, tuple(lengths)))
    return found or [Division(Split((None,) * len(case.tensors)), (1,))]


def find_wrong_buffer(plain: ModuleCase, case: ModuleCase, changed: dict[str, Tensor]) -> str:
    """Describe the first buffer that differs after the call; "" for none."""
    before = dict(case.scales.named_buffers())
    for name, value in plain.scales.named_buffers():
        ours = changed.get(f"scales.{name}", before[name])
        difference = find_difference(ours, value, bound=2**-6 if case.autocast else 1e-12, floor=1.0)
        if difference:
            return f"buffer {name}: {difference}"
    return ""


def find_wrong_strides(expected: list[Tensor], found: list[Tensor], trains: bool) -> str:
    """Describe the first result whose memory lies in another order; "" for none."""
    for place, (plain, ours) in enumerate(zip(expected[trains:], found[2 * trains :], strict=True)):
        if plain.numel() > 1 and plain.layout == torch.strided and plain.stride() != ours.stride():
            return f"result {place}: strides {ours.stride()}, eager {plain.stride()}"
    return ""
