"""Keeps the plans of calls, and makes one plan serve many sizes.

Note [signatures]: calls that differ in sizes and in numbers alone form a family. The first two signatures of a family
get a plan each, for exactly these numbers. The third is traced with symbols in place of the numbers that have differed;
see Note [symbolic sizes]. Such a plan serves every signature for which its guards hold. Ranks differ in the lengths of
their parts, so they exchange their guards: all ranks choose the same plan for a call.

All ranks make the same calls, so they make symbolic plans at the same time, as this exchange requires. Whether a rank
still has the plan of a signature is its own affair: which signatures a family has seen depends on whole shapes alone.
A part of one row may have strides of any order, so signatures with such parts always get a plan of their own.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.ir.logical_program import format_operator
from rankless.compiler.sharding.redistribute import CollectiveRecord
from rankless.compiler.tracing.symbolic_sizes import (
    EXPRESSION_GLOBALS,
    MIN_SYMBOLIC_SIZE,
    SymbolicSizes,
    compile_guards,
    format_expression,
    is_symbolic,
)
from rankless.logical_view.call_observers import CallKind, find_origin, send_call, send_records
from rankless.logical_view.call_plan import (
    CallPlan,
    CannotDivide,
    LogicalCall,
    ProgramParts,
    has_rows_everywhere,
    is_same_on_parts,
    lower_call,
    make_plan,
    propagate,
)
from rankless.logical_view.second_gradients import GradientCall
from rankless.logical_view.trace_call_to_program import TensorKind
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Placement, Replicate, Shard
from rankless.records.encoding import encode_msgpack
from rankless.user_code import caller_line

MAX_PLANS = 4096
"""How many plans are kept at least. Twice as many are kept at most."""
MAX_FAMILIES = 4096
EXACT_PLANS = 2
"""How many signatures of a family get a plan of their own before symbols are tried."""
MAX_SYMBOLIC_PLANS = 4
"""How often a family is traced with symbols."""
MAX_KNOWN = 8
MAX_CALL_CHARACTERS = 80
WARN_AFTER_TRACES = 12
"""After how many traces of a family the user learns of it."""

Numbers = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class SymbolicPlan:
    """A plan for all numbers of a family for which its guards hold.

    Attributes:
        orders: How the tensors lie in memory.
        fixed: The numbers that it was made for, None in place of symbols.
        groups: For each symbol the places of its numbers.
        holds: The guards of all ranks.
        holds_on_parts: The guards for which this rank may run the function itself; None if it may never.
        plan: The plan, whose shapes and lengths contain symbols.
        compute_sizes: Returns the sizes in the shapes and placements, in order, for the numbers of the symbols.
    """

    orders: tuple[Any, ...]
    fixed: Numbers
    groups: tuple[tuple[int, ...], ...]
    holds: Callable[[Sequence[Any]], bool]
    holds_on_parts: Callable[[Sequence[Any]], bool] | None
    plan: CallPlan
    compute_sizes: Callable[[Sequence[Any]], Iterator[int]]

    def specialize(self, numbers: Numbers, orders: tuple[Any, ...]) -> CallPlan | None:
        """Return the plan for some numbers of the family; None if it does not hold for these."""
        given = [numbers[group[0]] for group in self.groups]
        same = all(numbers[place] == numbers[group[0]] for group in self.groups for place in group)
        pairs = zip(self.fixed, numbers, strict=True)
        if not same or orders != self.orders or any(one is not None and one != other for one, other in pairs):
            return None
        if not self.holds(given):
            return None
        sizes = self.compute_sizes(given)
        shapes, placements = take_sizes(self.plan, sizes)
        if self.holds_on_parts is not None and self.holds_on_parts(given):
            return replace(self.plan, kind="direct", shapes=shapes, placements=placements, layouts={})
        again = self.plan.again
        if again is not None:
            shapes_of_draws, placements_of_draws = take_sizes(again, sizes)
            again = replace(again, shapes=shapes_of_draws, placements=placements_of_draws, numbers=tuple(given))
        programs = (self.plan.forward, self.plan.backward)
        forward, backward = (None if run is None else partial(run, *given) for run in programs)
        return replace(
            self.plan,
            shapes=shapes,
            placements=placements,
            forward=forward,
            backward=backward,
            again=again,
            layouts={},
        )


class CallFamily:
    """The calls that differ in sizes and numbers alone; see Note [signatures]."""

    def __init__(self) -> None:
        self.known: list[Numbers] = []
        """The numbers of signatures that have plans of their own."""
        self.exact: dict[Any, CallPlan | None] = {}
        """Plans for exact numbers and orders in memory, the last of them."""
        self.is_divided = False
        """Whether one of these plans divides the call."""
        self.symbolic: list[SymbolicPlan] = []
        self.attempts = 0
        self.traces = 0

    def find(self, numbers: Numbers, orders: tuple[Any, ...]) -> CallPlan | None:
        """Return a plan with symbols that serves some numbers."""
        if numbers not in self.known:
            for symbolic in self.symbolic:
                if (plan := symbolic.specialize(numbers, orders)) is not None:
                    return plan
        return None

    def needs_symbols(self, numbers: Numbers) -> bool:
        """Return whether to try symbols for some numbers that have no plan."""
        return len(self.known) >= EXACT_PLANS and numbers not in self.known and self.attempts < MAX_SYMBOLIC_PLANS

    def note(self, numbers: Numbers) -> None:
        """Note numbers that get a plan of their own."""
        if self.attempts < MAX_SYMBOLIC_PLANS and len(self.known) < MAX_KNOWN and numbers not in self.known:
            self.known.append(numbers)


class PlanCache:
    """The plans of the calls of a view.

    Args:
        mesh: The ranks.
        notify: Tells the user something.
    """

    def __init__(self, mesh: Mesh, notify: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._notify = notify
        self.recent: dict[Any, CallPlan | None] = {}
        """By signature; None stands for a call on whole values."""
        self._older: dict[Any, CallPlan | None] = {}
        """Those that were last used before the present ones: of `recent` and `older` the least recently used go."""
        self._families: dict[Any, CallFamily] = {}
        self.is_empty = True
        """Whether the script has made no call with divided values."""

    def find(self, signature: Any, call: LogicalCall) -> CallPlan | None:
        """Return the plan of a call that is not among the recent ones; None if it runs on whole values."""
        self.is_empty = False
        if signature in self._older:
            plan = self._older[signature]
        elif (plan := self._make(call)) is not None:
            plan = add_text(plan, call)
        if len(self.recent) >= MAX_PLANS:
            self._older, self.recent = self.recent, {}
        self.recent[signature] = plan
        return plan

    def _make(self, call: LogicalCall) -> CallPlan | None:
        family = self._find_family(call)
        numbers, orders = list_numbers(call), tuple(kind.order for kind in call.arguments.kinds)
        if (numbers, orders) in family.exact:  # strides, on which no plan depends, may have brought it here
            return family.exact[numbers, orders]
        if (plan := family.find(numbers, orders)) is not None:
            return plan
        if family.needs_symbols(numbers) and all(map(has_rows_everywhere, call.placements)):
            if not family.is_divided:
                return None  # other sizes could not be divided either
            family.attempts += 1
            self._count_trace(family, call)
            if (symbolic := self._make_symbolic(call, family, numbers)) is not None:
                family.symbolic.append(symbolic)
                return symbolic.specialize(numbers, orders)
        family.note(numbers)
        self._count_trace(family, call)
        plan = family.exact[numbers, orders] = self._make_exact(call)
        if plan is not None:
            family.is_divided = True
        if len(family.exact) > MAX_KNOWN:
            del family.exact[next(iter(family.exact))]
        return plan

    def _make_exact(self, call: LogicalCall) -> CallPlan | None:
        """Return the plan of a call for its own numbers."""
        try:
            parts = lower_call(call, self._mesh)
        except CannotDivide:
            return None
        return plan_exactly(parts, self._mesh)

    def _find_family(self, call: LogicalCall) -> CallFamily:
        forms = tuple(describe_form(leaf) for leaf in call.arguments.leaves)
        placements = tuple(map_lengths(placement, lambda _: 0) for placement in call.placements)
        key = (call.function, call.modes, call.arguments.structure, forms, placements)
        family = self._families.get(key)
        if family is None:
            if len(self._families) >= MAX_FAMILIES:
                del self._families[next(iter(self._families))]
            family = self._families[key] = CallFamily()
        return family

    def _make_symbolic(self, call: LogicalCall, family: CallFamily, numbers: Numbers) -> SymbolicPlan | None:
        """Return a plan with symbols for the numbers that have differed; None if a rank has none. Collective."""
        groups, sizes = group_numbers([*family.known, numbers]), SymbolicSizes()
        own: tuple[ProgramParts, SymbolicPlan] | None = None
        try:
            own = self._trace_with_symbols(call, groups, sizes)
            guards = None if own is None else sizes.guard_expressions()
        except Exception:  # PyTorch raises errors of many types; the other ranks learn of it
            guards = None
        everyone = self._exchange(guards)
        if own is None or everyone is None:
            return None
        parts, plan = own
        # From here on guards are this rank's own: they choose between two ways to run the same program.
        is_same = is_same_on_parts(parts, self._mesh, sizes)
        return replace(
            plan,
            holds=compile_guards(everyone, len(groups)),
            holds_on_parts=compile_guards(sizes.guard_expressions(), len(groups)) if is_same else None,
        )

    def _trace_with_symbols(
        self, call: LogicalCall, groups: tuple[tuple[int, ...], ...], sizes: SymbolicSizes
    ) -> tuple[ProgramParts, SymbolicPlan] | None:
        """Return a call's program and its plan, whose guards are not known yet; None if it needs all numbers."""
        made = make_symbols(call, groups, sizes)
        if made is None:
            return None
        parts = lower_call(made, self._mesh, sizes)
        plan = make_plan(parts, list(sizes.symbols))
        if not sizes.has_free_symbols() or not has_plain_leaves(plan):
            return None
        places = {place for group in groups for place in group}
        numbers = list_numbers(call)
        return parts, SymbolicPlan(
            orders=tuple(kind.order for kind in call.arguments.kinds),
            fixed=tuple(None if place in places else number for place, number in enumerate(numbers)),
            groups=groups,
            holds=always,
            holds_on_parts=None,
            plan=plan,
            compute_sizes=compile_sizes(plan, list(sizes.symbols)),
        )

    def _exchange(self, guards: Sequence[str] | None) -> list[str] | None:
        """Return the guards of all ranks; None if a rank has no plan."""
        self._mesh.check_sync_point("a plan for calls of several sizes")
        answers = all_gather_bytes(encode_msgpack(guards), mesh=self._mesh)
        found = [msgspec.msgpack.decode(answer, type=list[str] | None) for answer in answers]
        return None if None in found else [text for texts in found for text in texts or ()]

    def _count_trace(self, family: CallFamily, call: LogicalCall) -> None:
        """Count a trace of a family, and tell the user if there are many."""
        family.traces += 1
        if family.traces == WARN_AFTER_TRACES:
            name = getattr(call.function, "__name__", str(call.function))
            self._notify(
                f"{caller_line()}: {name} has been traced {WARN_AFTER_TRACES} times, because its sizes or numbers "
                "differ in each call and what it computes depends on them (correct, but each trace takes about 50 ms; "
                "pad to a few sizes)"
            )


class ObservedCall(NamedTuple):
    """What an observed view knows of a call: its plan, how it runs and why, and the transfers of its two programs."""

    plan: CallPlan | None
    kind: CallKind
    reason: str
    forward: Sequence[CollectiveRecord] = ()
    backward: Sequence[CollectiveRecord] = ()


class ObservedPlans(PlanCache):
    """Plans of the calls of a view whose observers hear of each call: none is `recent`, so that each is looked up.

    No plan has symbols, so the sizes of transfers are those of the call.
    """

    def __init__(self, mesh: Mesh, notify: Callable[[str], None]) -> None:
        super().__init__(mesh, notify)
        self._known: dict[Any, ObservedCall] = {}

    def find(self, signature: Any, call: LogicalCall) -> CallPlan | None:
        """Return the plan of a call, and tell the observers of it; None if it runs on whole values."""
        self.is_empty = False
        if signature not in self._known:
            self._known[signature] = self._observe(call)
        plan, kind, reason, forward, backward = self._known[signature]
        placements = [item for item in call.placements if not isinstance(item, Replicate)]
        if plan is not None and 0 < len(plan.gathered) < len(placements):
            return plan  # the call is made again with some values whole
        has_gradient = torch.is_grad_enabled() and any(item.requires_grad for item in call.arguments.kinds)
        send_call(call.function, kind, reason, has_gradient=has_gradient)
        if plan is None or plan.gathered:
            return plan
        origin, run = find_origin(), plan.backward
        send_records(forward, origin)
        if run is None or not backward:
            return plan

        def run_backward(*values: Any) -> Sequence[Any]:
            send_records(backward, origin)
            return run(*values)

        return replace(plan, backward=run_backward)

    def _observe(self, call: LogicalCall) -> ObservedCall:
        whole: CallKind = "whole" if any(isinstance(item, Shard) for item in call.placements) else "sum"
        try:
            parts = lower_call(call, self._mesh)
        except CannotDivide as error:
            return ObservedCall(None, whole, explain(error))
        plan = add_text(plan_exactly(parts, self._mesh), call)
        if plan.gathered:
            sharded = propagate(parts.lowered.traced, call.placements, {}, self._mesh)
            nodes = [node for node in sharded.nodes_without_rule if not node.meta["backward"]]
            names = ", ".join(dict.fromkeys(format_operator(node.target) for node in nodes))
            reason = f"no sharding rule for {names}" if names else "its rule does not fit how the rows are divided"
            return ObservedCall(plan, whole, reason)
        forward, backward = (
            [node.meta["collective"] for node in nodes if "collective" in node.meta]
            for nodes in (parts.forward, parts.backward)
        )
        reason = next((f"it gathers the {move.reason}" for move in forward if move.in_full), "")
        return ObservedCall(plan, "whole" if reason else "divided", reason, forward, backward)


def explain(error: CannotDivide) -> str:
    """Return why a call cannot be divided."""
    cause = error.__cause__
    if isinstance(cause, CannotDivide):
        return "it changes rows in place to a value that is whole"
    if isinstance(cause, DynamicOutputShapeException | DataDependentOutputException | GuardOnDataDependentSymNode):
        return "the shape of its result depends on values"
    return f"PyTorch cannot trace it ({type(cause).__name__})"


def plan_exactly(parts: ProgramParts, mesh: Mesh) -> CallPlan:
    """Return a plan for the sizes of one call."""
    plan = make_plan(parts)
    return replace(plan, kind="direct") if is_same_on_parts(parts, mesh) else plan


def add_text(plan: CallPlan, call: LogicalCall) -> CallPlan:
    """Return a plan with the text that names its call."""
    text = describe_call(call)[:MAX_CALL_CHARACTERS]
    return replace(plan, text=text, digest=zlib.crc32(text.encode()))


def describe_call(call: LogicalCall) -> str:
    """Return a text that names a function, and its arguments: shapes of whole tensors, numbers, and texts."""
    found = []
    for leaf in call.arguments.leaves:
        if isinstance(leaf, TensorKind):
            found.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        elif isinstance(leaf, bool | int | float | str | slice | None):
            found.append(repr(leaf))
    return f"{getattr(call.function, '__name__', 'a function')}({', '.join(found)})"


def always(_numbers: Sequence[Any]) -> bool:
    """Return True: no guard restricts the numbers."""
    return True


def list_numbers(call: LogicalCall) -> Numbers:
    """Return the numbers of a call in the order of `map_numbers`."""
    found: list[Any] = []

    def note(number: Any, _is_size: bool) -> Any:
        found.append(number)
        return number

    map_numbers(call, note)
    return tuple(found)


def map_numbers(call: LogicalCall, change: Callable[[Any, bool], Any]) -> LogicalCall:
    """Return a call with other numbers: the sizes of tensors, the lengths of their parts, and plain numbers.

    Args:
        call: The call.
        change: Returns another number for one, given whether it is a size or length.
    """
    remaining, placements = iter(call.placements), list[Placement]()

    def convert(kind: TensorKind) -> TensorKind:
        placement = next(remaining)
        shape = list(kind.shape)
        divided = placement.dim if isinstance(placement, Shard) else None
        for dim, size in enumerate(shape):
            if dim != divided:
                shape[dim] = change(size, True)
        placements.append(map_lengths(placement, lambda length: change(length, True)))
        if divided is not None:
            shape[divided] = sum(placements[-1].lengths)  # type: ignore[attr-defined]
        return replace(kind, shape=tuple(shape))

    arguments = call.arguments.map(convert, lambda number: change(number, False))
    return replace(call, arguments=arguments, placements=tuple(placements))


def map_lengths(placement: Placement, change: Callable[[Any], Any]) -> Placement:
    """Return a placement with other lengths."""
    return Shard(placement.dim, tuple(map(change, placement.lengths))) if isinstance(placement, Shard) else placement


def describe_form(leaf: Any) -> Any:
    """Return what an argument is besides its sizes and numbers."""
    if isinstance(leaf, TensorKind):
        return len(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, slice):
        return slice, *map(describe_form, (leaf.start, leaf.stop, leaf.step))
    return (type(leaf),) if type(leaf) in (int, float) else (type(leaf), leaf)


def group_numbers(known: Sequence[Numbers]) -> tuple[tuple[int, ...], ...]:
    """Return the places of numbers that differ between signatures; those that have always been equal together."""
    groups: dict[Any, list[int]] = {}
    for place, column in enumerate(zip(*known, strict=True)):
        if any(number != column[0] for number in column):
            groups.setdefault((type(column[0]), column), []).append(place)
    return tuple(map(tuple, groups.values()))


def make_symbols(call: LogicalCall, groups: Sequence[Sequence[int]], sizes: SymbolicSizes) -> LogicalCall | None:
    """Return a call with a symbol for each group of its numbers; None if a size is too small for a symbol."""
    numbers, of_sizes = list_numbers(call), list[bool]()

    def note(number: Any, is_size: bool) -> Any:
        of_sizes.append(is_size)
        return number

    map_numbers(call, note)
    symbols: dict[int, Any] = {}
    for group in groups:
        number, is_size = numbers[group[0]], any(of_sizes[place] for place in group)
        if is_size and number < MIN_SYMBOLIC_SIZE:
            return None
        made = sizes.create(number, f"size {len(sizes.symbols)}") if is_size else create_number(number, sizes)
        symbols |= dict.fromkeys(group, made)
    places = iter(range(len(numbers)))
    return map_numbers(call, lambda number, _: symbols.get(next(places), number))


def create_number(number: Any, sizes: SymbolicSizes) -> Any:
    """Return a symbol for a number that is no size, and may be zero or negative."""
    environment, source = sizes.shape_env, ConstantSource(f"number {len(sizes.symbols)}")
    symbol = environment.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC)
    create: Any = environment.create_symintnode if isinstance(number, int) else environment.create_symfloatnode
    made = sizes.symbols[str(symbol)] = create(symbol, hint=number, source=source)
    return made


def take_sizes(
    made: CallPlan | GradientCall, sizes: Iterator[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[Placement, ...]]:
    """Return the shapes and placements of a plan with the next of some sizes, in the order of `list_sizes`."""
    shapes = tuple(tuple(next(sizes) for _ in shape) for shape in made.shapes)
    return shapes, tuple(map_lengths(placement, lambda _: next(sizes)) for placement in made.placements)


def list_sizes(made: CallPlan | GradientCall) -> list[Any]:
    """Return the sizes in shapes, then the lengths in placements."""
    lengths = [length for item in made.placements if isinstance(item, Shard) for length in item.lengths]
    return [size for shape in made.shapes for size in shape] + lengths


def compile_sizes(plan: CallPlan, names: Sequence[str]) -> Callable[[Sequence[Any]], Iterator[int]]:
    """Return what computes the sizes of a plan's shapes, then the lengths of its placements."""
    sizes = list_sizes(plan) + ([] if plan.again is None else list_sizes(plan.again))
    texts = [format_expression(size) if is_symbolic(size) else repr(size) for size in sizes]
    code = compile(f"({''.join(f'{text}, ' for text in texts)})", "<rankless sizes>", "eval")

    def compute(numbers: Sequence[Any]) -> Iterator[int]:
        return iter(eval(code, dict(EXPRESSION_GLOBALS), dict(zip(names, numbers, strict=True))))

    return compute


def has_plain_leaves(plan: CallPlan) -> bool:
    """Return whether no part of a plan's result is a symbol."""
    return not any(is_symbolic(getattr(leaf, "value", None)) for leaf in plan.leaves)
