"""The cases that PyTorch's operator database gives: an operator, its sample arguments, their layout, and how it runs.

`op_db` has over 700 variants with generators of arguments. This module makes jobs of them, as a script would write
them, and says on which dims their arguments can be divided.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

Mode = Literal["forward", "backward", "double backward", "forward mode", "in place"]
Layout = Literal["contiguous", "transposed", "channels_last"]

MODES: tuple[Mode, ...] = ("backward", "forward", "double backward", "forward mode", "in place")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "channels_last")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.int64,
    torch.bool,
)
FINE_DTYPES = (torch.float64, torch.complex128)
"""In which derivatives of derivatives are compared: in others rounding hides faults."""
MAX_SAMPLES = 3
MAX_CANDIDATES = 60
MAX_ELEMENTS = 20_000
SEED = 20261124

NOT_TRACEABLE = {
    "empty": "returns memory that nobody wrote",
    "empty_like": "returns memory that nobody wrote",
    "empty_permuted": "returns memory that nobody wrote",
    "empty_strided": "returns memory that nobody wrote",
    "new_empty": "returns memory that nobody wrote",
    "new_empty_strided": "returns memory that nobody wrote",
}
"""Variants that have no result to compare, with the reason."""


def variant_name(operator: "OpInfo") -> str:
    """Return a variant's name in the database, such as "norm.fro"."""
    return operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")


@functools.cache
def invocations() -> ModuleType:
    """Return PyTorch's module of the database. Only tests that read it import it: that takes three seconds."""
    return importlib.import_module("torch.testing._internal.common_methods_invocations")


@functools.cache
def variants() -> dict[str, "OpInfo"]:
    """Return the variants by name."""
    return {variant_name(operator): operator for operator in invocations().op_db}


@dataclass(frozen=True)
class Split:
    """How the tensor arguments are divided: for each a dim, or None for whole."""

    dims: tuple[int | None, ...]

    def __str__(self) -> str:
        return ", ".join("whole" if dim is None else f"dim {dim}" for dim in self.dims)


@dataclass(frozen=True)
class DatabaseCase:
    """One operator with one set of arguments, as a job that can be captured."""

    variant: str
    dtype: torch.dtype
    layout: Layout
    mode: Mode
    number: int
    """The number of the sample among those that were chosen."""
    leaves: tuple[Any, ...] = field(repr=False, compare=False)
    spec: pytree.TreeSpec = field(repr=False, compare=False)
    function: Callable[..., Any] = field(repr=False, compare=False)
    """The operator. The job reads it from here: a capture looks at all that a job can reach."""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.variant}, {name}, {self.layout}, {self.mode}, sample {self.number}: {self.describe()}"

    def describe(self) -> str:
        """Describe the arguments briefly."""
        texts = [
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in self.leaves
        ]
        return ", ".join(texts)[:160]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments, in their layout."""
        return [set_layout(leaf, self.layout) for leaf in self.leaves if isinstance(leaf, Tensor)]

    @cached_property
    def differentiable(self) -> list[bool]:
        """Which tensor arguments get a gradient."""
        kinds = self.mode in ("backward", "double backward", "forward mode")
        return [kinds and (item.is_floating_point() or item.is_complex()) for item in self.tensors]

    @cached_property
    def scales(self) -> "Scales":
        """A module whose parameters, all ones, multiply the arguments: their gradients show the arguments' ones."""
        return Scales(self.tensors, self.differentiable)

    @property
    def computing_dtypes(self) -> set[torch.dtype]:
        """The types in which values are rounded."""
        return {item.dtype for item in self.tensors}

    @property
    def is_thorough(self) -> bool:
        """Whether every division is tried: the others take turns, because dtype and layout do not change the shapes."""
        is_plain = self.dtype == torch.float64 and self.layout == "contiguous"
        return is_plain and self.mode in ("forward", "backward")

    @property
    def trains(self) -> bool:
        """Whether the job has a loss."""
        return self.mode in ("backward", "double backward")

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the operator and return its tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        given, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.function(given, *args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    def job(self, *tensors: Tensor) -> Any:
        """Run the case as the function of a job does: return a loss, if it trains, and the operator's results."""
        scaled = self.scales(tensors)
        if self.mode == "in place":
            return self.call([item.clone() for item in scaled])
        if self.mode == "forward mode":
            return run_forward_mode(self, scaled)
        results = self.call(scaled)
        if not self.trains:
            return results
        loss = weigh(results, self.layout)
        if self.mode == "double backward":
            moved = [item for item, flag in zip(scaled, self.differentiable, strict=True) if flag]
            gradients = torch.autograd.grad(loss, moved, create_graph=True, allow_unused=True)
            kept = [item for item in gradients if item is not None and item.requires_grad]
            return (loss + weigh(kept, self.layout) if kept else loss), *results
        return loss, *results

    def splits(self) -> Iterator[Split]:
        """Yield every division that is tried: each tensor along each dim, alone and with the others of equal sizes."""
        seen = set()
        for position, tensor in enumerate(self.tensors):
            for dim, size in enumerate(tensor.shape):
                if size < 2:
                    continue
                for joint in (False, True):
                    dims = tuple(
                        dim if other == position else matching_dim(item, size, dim - tensor.dim()) if joint else None
                        for other, item in enumerate(self.tensors)
                    )
                    if dims not in seen:
                        seen.add(dims)
                        yield Split(dims)


@contextlib.contextmanager
def without_seeds() -> Iterator[None]:
    """Within the context, random operators of the database draw on: by itself it seeds the generator for each call."""
    seeding = invocations().wrapper_set_seed
    invocations().wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    try:
        yield
    finally:
        invocations().wrapper_set_seed = seeding


class Scales(nn.Module):
    """Parameters of ones in the shapes and layouts of the arguments that get gradients."""

    def __init__(self, tensors: Sequence[Tensor], differentiable: Sequence[bool]) -> None:
        super().__init__()
        for number, (item, flag) in enumerate(zip(tensors, differentiable, strict=True)):
            if flag:
                self.register_parameter(f"scale{number}", nn.Parameter(torch.ones_like(item)))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments times their parameters."""
        known = dict(self.named_parameters())
        return [
            item * known[f"scale{number}"] if f"scale{number}" in known else item for number, item in enumerate(tensors)
        ]


def matching_dim(tensor: Tensor, size: int, from_last: int) -> int | None:
    """Return the dim that broadcasting pairs with a dim `from_last` of another tensor, if the sizes are equal."""
    dim = tensor.dim() + from_last
    return dim if 0 <= dim < tensor.dim() and tensor.shape[dim] == size else None


def weigh(values: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return a real sum, in float64, in which every element of the differentiable values has another weight.

    The weights lie in memory in this layout, and so do the gradients that the operator's backward gets.
    """
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        if value.is_complex():
            real = torch.view_as_real(value.resolve_conj())
        elif value.is_floating_point():
            real = value
        else:
            continue
        weights = torch.sin(torch.arange(1.0, real.numel() + 1, dtype=torch.float64)).view(real.shape)
        total = total + (real.to(torch.float64) * set_layout(weights, layout)).sum()
    return total


def run_forward_mode(case: DatabaseCase, scaled: Sequence[Tensor]) -> list[Tensor]:
    """Return the operator's results and their derivatives in one direction."""
    moved = [item for item, flag in zip(scaled, case.differentiable, strict=True) if flag]

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(inputs)
        return tuple(
            case.call(
                [next(remaining) if flag else item for item, flag in zip(scaled, case.differentiable, strict=True)]
            )
        )

    values, tangents = torch.func.jvp(function, tuple(moved), tuple(item.detach().cos() for item in moved))
    return [*values, *tangents]


def set_layout(value: Tensor, layout: Layout) -> Tensor:
    """Return a copy whose memory lies in the given order."""
    plain = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if layout == "transposed" and plain.dim() >= 2:
        return plain.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "channels_last" and plain.dim() in (4, 5):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return plain.contiguous(memory_format=formats[plain.dim()])
    return plain


def modes_for(operator: "OpInfo", dtype: torch.dtype, layout: Layout) -> list[Mode]:
    """Return how an operator runs in a dtype: with its backward if it has one, and with what else eager PyTorch has."""
    differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
    modes: list[Mode] = ["backward" if differentiable else "forward"]
    if dtype in FINE_DTYPES and layout != "channels_last":
        if differentiable and operator.supports_gradgrad:
            modes.append("double backward")
        if differentiable and operator.supports_forward_ad:
            modes.append("forward mode")
    if dtype == torch.float64 and layout == "contiguous" and operator.inplace_variant is not None:
        modes.append("in place")
    return modes


FlattenedSample = tuple[tuple[Any, ...], pytree.TreeSpec, bool]
"""The leaves of a sample's arguments, their structure, and whether the first is broadcast to the others."""


def samples_of(operator: "OpInfo", dtype: torch.dtype) -> list[FlattenedSample]:
    """Return a few samples of an operator's arguments that have a tensor to divide: flattened, with their structure.

    The samples are those with other shapes and other plain arguments, spread over all that the database gives.
    """
    torch.manual_seed(SEED)
    chosen: dict[Any, FlattenedSample] = {}
    for count, sample in enumerate(operator.sample_inputs("cpu", dtype, requires_grad=False)):
        if count == MAX_CANDIDATES:
            break
        found = flatten_sample(sample)
        if found is not None:
            leaves = found[0]
            key = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
            chosen.setdefault(key, found)
    # Samples with more tensors that can be divided come first.
    ranked = sorted(chosen.values(), key=lambda found: -count_divisible(found[0]))
    if len(ranked) <= MAX_SAMPLES:
        return ranked
    return [ranked[place * (len(ranked) - 1) // (MAX_SAMPLES - 1)] for place in range(MAX_SAMPLES)]


def flatten_sample(sample: "SampleInput") -> FlattenedSample | None:
    """Return a sample's leaves and structure, or None if it has no dense tensor that can be divided."""
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(item.layout != torch.strided or item.numel() > MAX_ELEMENTS for item in tensors):
        return None
    return (tuple(leaves), spec, bool(sample.broadcasts_input)) if count_divisible(leaves) else None


def count_divisible(leaves: Sequence[Any]) -> int:
    """Count the dims along which a tensor can be divided."""
    return sum(size >= 2 for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)


def cases_of(variant: str) -> Iterator[DatabaseCase]:
    """Yield the cases of a variant: every dtype, layout and mode that it has, with a few samples each."""
    operator = variants()[variant]
    if variant in NOT_TRACEABLE:
        return
    for dtype in DTYPES:
        if dtype not in operator.dtypes:
            continue
        samples = samples_of(operator, dtype)
        for layout in LAYOUTS:
            for number, (leaves, spec, broadcasts) in enumerate(samples):
                if layout != "contiguous" and not has_layout(leaves, layout):
                    continue
                for mode in modes_for(operator, dtype, layout):
                    if mode == "in place" and broadcasts:
                        continue
                    function = operator.op if mode != "in place" else operator.inplace_variant
                    yield DatabaseCase(variant, dtype, layout, mode, number, leaves, spec, function)


def has_layout(leaves: Sequence[Any], layout: Layout) -> bool:
    """Return whether a layout differs from contiguous memory for one of the tensors."""
    dims = [leaf.dim() for leaf in leaves if isinstance(leaf, Tensor)]
    return any(dim >= 2 for dim in dims) if layout == "transposed" else any(dim in (4, 5) for dim in dims)
