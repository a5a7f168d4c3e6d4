"""Run a case of the operator database on simulated ranks, compare it with eager PyTorch, and classify the outcome."""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from operator_database import SEED, DatabaseCase, Split, without_seeds
from simulated_programs import interpret
from simulated_ranks import (
    Outcome,
    collect_inputs,
    divide_evenly,
    make_meshes,
    make_outcome,
    run_program_on_axes,
)
from support.devices import get_random_state
from torch import Tensor

from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, JobSource, capture
from rankless.compiler.capture.value_reads import ValueNeeded, ValueReads
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.lowering.lower import lower
from rankless.compiler.lowering.value_check import OtherValueRead
from rankless.compiler.sharding.sharding_propagation import propagate_shardings
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import Replicate, Shard, Sharding, split_lengths

Kind = Literal["split", "gathered", "refused", "wrong", "crashed"]

BOUNDS = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 2e-6,
    torch.complex64: 2e-6,
    torch.complex32: 2**-9,
    torch.float16: 2**-9,
    torch.bfloat16: 2**-6,
}
"""The allowed difference, relative to a tensor's largest entry: for the half types a rounding of a sum's terms."""
CANCELLATION = 10.0
"""Terms of second derivatives cancel, so that they round more, relative to their sum, than those of first ones."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""In which ranks round their terms of a gradient before these are added, as in DistributedDataParallel."""
COARSE_DTYPES = (torch.float32, *HALF_DTYPES)
AMPLIFIED = 4.0
"""How far two computations in a coarse type may lie apart, in units of the error of one of them."""
PERTURBED = 4
"""The number of perturbed runs that measure that error."""
MOST_PAIRS = 6
"""The number of divisions on two axes of a case."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Expected:
    """What eager PyTorch computes on whole tensors."""

    results: list[Tensor]
    gradients: dict[str, Tensor]
    draws: bool
    """Whether it draws random numbers."""


@dataclass(frozen=True)
class Result:
    """The outcome of a case under one division of its arguments."""

    kind: Kind
    reason: str = ""
    is_exact: bool = True
    """Whether all values are equal to the last bit."""


@dataclass(frozen=True)
class Division:
    """The pieces of the ranks: which dims are divided, and in what lengths."""

    split: Split
    lengths: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.lengths)

    def run(self, program: LogicalProgram, case: DatabaseCase) -> Outcome:
        """Run the program of every rank."""
        shardings: list[Sharding] = [
            (Replicate() if dim is None else Shard(dim, self.lengths),) for dim in self.split.dims
        ]
        sharded = propagate_shardings(program, shardings, [self.ranks])
        graphs = [lower(sharded, mesh) for mesh in make_meshes([self.ranks])]
        inputs = collect_inputs(graphs, case.tensors, shardings, {"scales": case.scales})
        torch.manual_seed(SEED)
        return make_outcome(sharded, graphs, interpret(graphs, inputs, {}, [self.ranks]))

    def __str__(self) -> str:
        return f"{self.split} as {list(self.lengths)}"


@dataclass(frozen=True)
class AxesDivision:
    """The pieces of the workers of a mesh of two axes of two ranks: which dims each axis divides."""

    splits: tuple[Split, Split]

    def run(self, program: LogicalProgram, case: DatabaseCase) -> Outcome:
        """Run the program of every worker."""
        dims = zip(*(split.dims for split in self.splits), strict=True)
        pairs = zip(case.tensors, dims, strict=True)
        shardings = [divide_evenly(item.shape, (2, 2), of_axes) for item, of_axes in pairs]
        torch.manual_seed(SEED)
        return run_program_on_axes(program, case.tensors, {"scales": case.scales}, (2, 2), shardings)

    def __str__(self) -> str:
        return f"{self.splits[0]} and {self.splits[1]} on two axes"


AnyDivision = Division | AxesDivision


class NoOracle(Exception):
    """Eager PyTorch itself does not run the case."""


def divisions_of(case: DatabaseCase) -> Iterator[Division]:
    """Yield the divisions of a case: as even as possible for 2 and for 3 ranks, and as one row and the rest."""
    for place, split in enumerate(case.splits()):
        size = next(item.shape[dim] for item, dim in zip(case.tensors, split.dims, strict=True) if dim is not None)
        wanted = dict.fromkeys((split_lengths(size, 2), (1, size - 1), split_lengths(size, 3)))
        possible = [Division(split, tuple(lengths)) for lengths in wanted if min(lengths) > 0]
        yield from possible if case.is_thorough else [possible[(place + case.number) % len(possible)]]


def divisions_on_two_axes(case: DatabaseCase) -> Iterator[AxesDivision]:
    """Yield some divisions of a case on two axes, always the same ones: of all pairs of dims, a random choice."""
    pairs = list(product(case.splits(), repeat=2))
    chosen = random.Random(str(case)).sample(pairs, min(MOST_PAIRS, len(pairs)))
    for pair in chosen:
        dims = zip(*(split.dims for split in pair), strict=True)
        counts = [Counter(dim for dim in of_axes if dim is not None) for of_axes in dims]
        pieces = zip(case.tensors, counts, strict=True)
        if all(item.shape[dim] >= 2**count for item, of_dims in pieces for dim, count in of_dims.items()):
            yield AxesDivision(pair)


@without_seeds()
def run_eagerly(case: DatabaseCase) -> Expected:
    """Run a case as plain PyTorch. Raises `NoOracle` if PyTorch does not."""
    torch.manual_seed(SEED)
    state = get_random_state()
    try:
        found = case.job(*[item.clone() for item in case.tensors])
        results = list(found) if isinstance(found, list | tuple) else [found]
        gradients: dict[str, Tensor] = {}
        if case.trains:
            if not results[0].requires_grad:
                raise NoOracle("no result depends on an argument")
            parameters = dict(case.scales.named_parameters())
            grads = torch.autograd.grad(results[0], list(parameters.values()), allow_unused=True)
            gradients = {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise NoOracle(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    draws = not torch.equal(get_random_state(), state)
    return Expected([item.detach() for item in results], gradients, draws)


class CapturedCase:
    """A case after capture, for the values that its Python reads."""

    def __init__(self, case: DatabaseCase) -> None:
        self.case = case
        self.known: list[Any] = []
        self.captured = self._capture_with_reads()

    @without_seeds()
    def _capture(self, reads: ValueReads) -> CapturedJob:
        source = JobSource(
            name="job", function=self.case.job, modules={"scales": self.case.scales}, trains=self.case.trains
        )
        shapes = [
            ArgumentShape(shape=tuple(item.shape), dtype=item.dtype, order=find_memory_order(item.shape, item.stride()))
            for item in self.case.tensors
        ]
        return capture(source, lambda tensors: (tuple(tensors), {}), shapes, CPU, reads=reads)

    def _capture_with_reads(self) -> CapturedJob:
        while True:
            reads = ValueReads(self.known)
            try:
                return self._capture(reads)
            except (ValueNeeded, Exception) as error:
                if not reads.has_guesses:
                    raise
                if isinstance(error, CaptureError) and not isinstance(error.__cause__, ValueNeeded):
                    raise
            self.known.append(self._compute_next_value())

    def _compute_next_value(self) -> Any:
        captured = self._capture(ValueReads(self.known, ends_at_unknown=True))
        whole = Division(Split((None,) * len(self.case.tensors)), (1,))
        return whole.run(captured.program, self.case).results[0].item()

    def run(self, division: AnyDivision) -> Outcome:
        """Run the program of every rank, and capture again while a value differs from the one captured for."""
        while True:
            try:
                return division.run(self.captured.program, self.case)
            except OtherValueRead as other:
                self.known = [read.value for read in self.captured.reads[: other.position]] + [other.value]
            self.captured = self._capture_with_reads()


def classify(
    case: DatabaseCase, list_divisions: Callable[[DatabaseCase], Iterable[AnyDivision]] = divisions_of
) -> Iterator[tuple[AnyDivision | None, Result]]:
    """Yield the result of a case for each division, or one for all if it is refused. Nothing if PyTorch fails.

    A crash is a result too: an exception that is not a `CaptureError` with the line of the script.
    """
    try:
        expected = run_eagerly(case)
    except NoOracle:
        return
    try:
        captured = CapturedCase(case)
    except CaptureError as error:
        yield None, Result("refused", describe_refusal(error))
        return
    except Exception as error:
        yield None, Result("crashed", describe_error(error))
        return
    for division in list_divisions(case):
        try:
            outcome = captured.run(division)
        except CaptureError as error:
            yield division, Result("refused", describe_refusal(error))
        except Exception as error:
            yield division, Result("crashed", describe_error(error))
        else:
            yield division, compare(case, expected, outcome)


def describe_refusal(error: CaptureError) -> str:
    """Return the first line of what was found, without names of values."""
    return str(error.found).splitlines()[0]


def describe_error(error: Exception) -> str:
    """Return the type and the first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def compare(case: DatabaseCase, expected: Expected, outcome: Outcome) -> Result:
    """Compare the results and gradients with eager PyTorch's, and say whether the operator ran on pieces.

    The loss is a sum of the results, over all ranks: it is left to the gradients to show whether it is right.
    """
    found, wanted = (outcome.results[2:], expected.results[1:]) if case.trains else (outcome.results, expected.results)
    pairs = [(f"result {place}", *pair) for place, pair in enumerate(zip(found, wanted, strict=True))]
    bounds = [BOUNDS[dtype] for dtype in case.computing_dtypes if dtype in BOUNDS]
    bound = max(bounds, default=0.0) * (CANCELLATION if case.mode == "double backward" else 1.0)
    natural = max(map(magnitude, wanted), default=0.0) / max(1e-30, *map(magnitude, case.tensors), 1e-30)
    largest = max([natural, *map(magnitude, expected.gradients.values())])
    entries = max((item.numel() for item in wanted), default=1)
    for name, gradient in expected.gradients.items():
        pairs.append((f"gradient of scales.{name}", outcome.gradients[f"scales.{name}"], gradient))
    is_exact = True
    for name, ours, eager in pairs:
        floor = natural if case.mode == "forward mode" else 0.0
        if name.startswith("gradient"):  # a sum of as many terms as results broadcast one entry of the argument
            floor = max(largest, natural * entries / max(1, eager.numel()))
            if eager.dtype in HALF_DTYPES:
                floor = max(floor, outcome.largest_terms.get(name.removeprefix("gradient of "), 0.0))
                ours = without_overflows(ours, eager)
        difference = find_difference(ours, eager, bound=bound, floor=floor)
        if difference and not is_rounding_of_eager(case, expected, name, ours, floor):
            return Result("wrong", f"{name}: {difference}")
        is_exact = is_exact and same_bits(ours, eager)
    line = find_gather(outcome)
    return Result("gathered" if line else "split", line, is_exact)


def is_rounding_of_eager(case: DatabaseCase, expected: Expected, name: str, ours: Tensor, floor: float) -> bool:
    """Return whether eager PyTorch's own value is about as far from ours as from others that are as right as it is.

    These are that of the same job in float64, and those for arguments that differ in their last bit. Some operators
    amplify the rounding of a coarse type: a correlation in half precision is off by some per cent.
    """
    if case.dtype not in COARSE_DTYPES:
        return False
    eager = pick(expected, name, case)
    others = [replace_floating(case, leaf_in_float64, torch.float64)] if not expected.draws else []
    generator = torch.Generator(torch.get_default_device()).manual_seed(SEED)
    others += [replace_floating(case, partial(change_last_bits, generator), case.dtype) for _ in range(PERTURBED)]
    error = 0.0
    for other in others:
        try:
            exact = pick(run_eagerly(other), name, case)
        except (NoOracle, LookupError):
            continue
        if exact.shape == eager.shape and is_floating(exact) and is_floating(eager):
            error = max(error, magnitude(eager.double() - exact.double()) / max(magnitude(exact), floor, 1e-30))
    return not find_difference(ours, eager, bound=AMPLIFIED * error, floor=floor)


def pick(values: Expected, name: str, case: DatabaseCase) -> Tensor:
    """Return the result or the gradient of this name."""
    kind, _, key = name.rpartition(" ")
    if kind == "result":
        return values.results[int(key) + case.trains]
    return values.gradients[key.removeprefix("scales.")]


def replace_floating(case: DatabaseCase, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> DatabaseCase:
    """Return the case with other real arguments."""
    leaves = tuple(change(leaf) if is_floating(leaf) else leaf for leaf in case.leaves)
    return replace(case, dtype=dtype, leaves=leaves)


def leaf_in_float64(value: Tensor) -> Tensor:
    """Return an argument in float64."""
    return value.double()


def change_last_bits(generator: torch.Generator, value: Tensor) -> Tensor:
    """Return an argument in which each number has moved to a neighbour, or stayed."""
    direction = torch.randint(-1, 2, value.shape, generator=generator).to(value.dtype)
    moved = torch.nextafter(value, value + direction)
    return torch.where(direction == 0, value, moved)


def without_overflows(ours: Tensor, eager: Tensor) -> Tensor:
    """Return a gradient in half precision with eager PyTorch's value where a rank's part of it may have overflowed."""
    if ours.shape != eager.shape or eager.layout != torch.strided:  # the sparse gradient of an embedding
        return ours
    is_large = ~(eager.abs() < torch.finfo(eager.dtype).max / 2)
    return torch.where(is_large & ~ours.isfinite(), eager, ours)


def is_floating(value: object) -> bool:
    """Return whether a value is a tensor of real floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def find_gather(outcome: Outcome) -> str:
    """Return what the operator, or its backward, needs whole of a value that was divided; "" if nothing."""
    source, first = inspect.getsourcelines(DatabaseCase.call)
    for record in outcome.local.collectives:
        file, _, line = record.line.rpartition(":")
        is_own = file.endswith("operator_database.py") and first <= int(line) < first + len(source)
        if record.gathered and record.purpose in ("input", "operator") and is_own:
            return record.reason
    return ""


def find_difference(ours: Tensor, eager: Tensor, *, bound: float, floor: float) -> str:
    """Describe how two tensors differ by more than `bound`, relative to the largest entry; "" if they do not.

    `floor` is the natural size of a gradient: one that is only rounding, because its terms cancel, is compared with it.
    """
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"{ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
    if eager.dtype not in BOUNDS:
        return "" if torch.equal(widen(ours), widen(eager)) else "other values"
    found, wanted = widen(ours), widen(eager)
    for name, test in (("NaN", torch.isnan), ("infinity", torch.isposinf), ("-infinity", torch.isneginf)):
        if not torch.equal(test(found), test(wanted)):
            return f"{name} in other places"
    finite = torch.isfinite(wanted)
    difference = magnitude((found - wanted)[finite]) / max(magnitude(wanted), floor, 1e-30)
    return f"off by {difference:.3g} of the largest entry" if difference > max(bound, BOUNDS[eager.dtype]) else ""


def widen(value: Tensor) -> Tensor:
    """Return the numbers of a tensor in float64, those of a complex one as pairs; a sparse one is made dense."""
    value = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    value = value.resolve_conj().resolve_neg()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def magnitude(value: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    wide = widen(value)
    wide = wide[torch.isfinite(wide)]
    return float(wide.abs().max()) if wide.numel() else 0.0


def same_bits(ours: Tensor, eager: Tensor) -> bool:
    """Return whether two tensors are equal to the last bit, where NaN equals NaN."""
    return torch.equal(widen(ours).nan_to_num(nan=1.5e300), widen(eager).nan_to_num(nan=1.5e300))
