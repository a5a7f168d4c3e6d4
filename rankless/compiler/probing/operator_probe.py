"""Strategies for operators without a sharding rule, found by experiment; see decision 0027.

Rank 0 runs the experiment in a forked child on its CPU, and tells the other ranks. Programs are compared before, so
all ranks ask the same questions in the same order.

Note [checks of probed operators]: sample data cannot show everything. So at the first call of a program, and 1, 2, 4,
8, … calls later, the ranks gather the arguments of such an operator, and each compares its rows of the whole result.
They do so together or not at all, because the number of the call is one for all. If a rank's rows differ, all ranks
raise, before anything of the call has changed. The cost is one gather, and one whole run of the operator on each
rank, each time that the number of calls has doubled.
"""

import contextlib
import gc
import hashlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.capture.trace_errors import WHOLE_BATCH
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.probing.row_independence import (
    Dims,
    Function,
    find_output_dims,
    is_close,
    list_results,
    same_bits,
)
from rankless.compiler.rules.strategy import GraphBuilder, LocalValue, LoweringRule, OperatorCall, Strategy
from rankless.config.environment import user_cache_folder
from rankless.errors import StepError
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import Placement, Replicate, Shard
from rankless.records.encoding import encode_json

SECONDS = 15.0
"""Time limit for an experiment."""
MAX_BYTES = 1 << 28
"""Of all arguments and results. The experiment with larger ones would take too long."""
LASTING_NAMESPACES = ("aten", "prims")
"""Operators that stay the same as long as PyTorch's version does. Only their answers are kept on disk: the code of
others may change between two runs."""
NOT_PROBED_NAMESPACES = ("rankless", "c10d", "_c10d_functional", "c10d_functional", "symm_mem")
"""Ours, and collectives."""
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
"""Types of arguments that an experiment can pass on."""


@dataclass(frozen=True)
class Candidate:
    """One way to divide the arguments of a call."""

    dims: Dims
    lengths: tuple[int, ...]


VERSION = 2
"""Of the experiment. Answers of others are not read."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """How an operator can be split."""

    candidate: int | None = None
    """The place of the division of its arguments among the candidates; None if none is right."""
    outputs: tuple[int | None, ...] = ()
    """The dims along which its results are divided then; None for a result that is absent."""


class AnswerCache:
    """Answers in a folder. A folder that cannot be written, or a damaged file, is the same as no answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, question: str) -> ProbeAnswer | None:
        """Return the answer to a question, or None if there is none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._file(question).read_bytes(), type=ProbeAnswer)
        return None

    def save(self, question: str, answer: ProbeAnswer) -> None:
        """Keep an answer. Other processes see all of it or nothing."""
        file = self._file(question)
        own = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(encode_json(answer))
            own.replace(file)

    def _file(self, question: str) -> Path:
        digest = hashlib.blake2b(f"{VERSION} {torch.__version__} {question}".encode(), digest_size=16)
        return self._folder / f"{digest.hexdigest()}.json"


def default_folder() -> Path:
    """Return the folder for answers: `rankless/probes` in the user's folder for caches."""
    return user_cache_folder() / "rankless" / "probes"


class OperatorProbe:
    """Probes operators, and keeps the answers."""

    def __init__(self, mesh: Mesh, cache: AnswerCache | None = None) -> None:
        self._mesh = mesh
        self._cache = AnswerCache(default_folder()) if cache is None else cache
        self._answers: dict[str, ProbeAnswer] = {}
        self.calls = CallNumber()
        """Numbers the calls of the job; see Note [checks of probed operators]."""

    def strategies(self, call: OperatorCall) -> Iterator[Strategy]:
        """Yield the strategy that an experiment shows to be right, if there is one. Collective."""
        candidates = list_candidates(call) if is_probed(call) else []
        if not candidates:
            return
        question = describe_question(call, candidates)
        if question not in self._answers:
            own = self._answer(question, call, candidates) if self._mesh.rank == 0 else ProbeAnswer()
            data = broadcast_bytes(encode_json(own), mesh=self._mesh)
            self._answers[question] = msgspec.json.decode(data, type=ProbeAnswer)
        answer = self._answers[question]
        if answer.candidate is None:
            return
        chosen = candidates[answer.candidate]
        yield Strategy(
            tuple(make_placement(dim, chosen.lengths) for dim in chosen.dims),
            tuple(make_placement(dim, chosen.lengths) for dim in answer.outputs),
            lower=self._check_rows(call, chosen, answer),
        )

    def _check_rows(self, call: OperatorCall, chosen: Candidate, answer: ProbeAnswer) -> LoweringRule:
        """Return what adds a call that is compared with the whole batch now and then."""
        by_node = dict(zip(call.inputs, chosen.dims, strict=True))
        leaves = pytree.tree_leaves((call.node.args, call.node.kwargs))
        check = RowCheck(
            operator=call.operator,
            line=str(call.node.meta.get("line", "")),
            lengths=chosen.lengths,
            inputs=tuple(by_node[item] if isinstance(item, fx.Node) else None for item in leaves),
            outputs=answer.outputs,
            calls=self.calls,
        )

        def add_checked(builder: GraphBuilder, _call: OperatorCall, args: Any, kwargs: Any) -> LocalValue:
            return builder.call(CheckedOperator(check, builder.axis), *args, **kwargs)

        return add_checked

    def _answer(self, question: str, call: OperatorCall, candidates: Sequence[Candidate]) -> ProbeAnswer:
        lasts = call.operator.namespace in LASTING_NAMESPACES
        known = self._cache.load(question) if lasts else None
        if known is not None and is_fitting(known, candidates, call):
            return known
        data = run_in_child(partial(experiment, call, candidates), SECONDS)
        if data is None:
            return ProbeAnswer()  # it crashed or took too long, which another time it may not
        answer = msgspec.json.decode(data, type=ProbeAnswer)
        if lasts:
            self._cache.save(question, answer)
        return answer


def is_probed(call: OperatorCall) -> bool:
    """Return whether an experiment with an operator can tell anything."""
    operator = call.operator
    if operator.namespace in NOT_PROBED_NAMESPACES or operator._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    outputs = call.node.meta["val"]
    values = [*[node.meta["val"] for node in call.inputs], *(outputs if isinstance(outputs, tuple) else (outputs,))]
    if not all(value is None or isinstance(value, LogicalValue) for value in values):
        return False
    tensors = [value for value in values if value is not None]
    if any(value.is_sparse or not all(type(size) is int for size in value.shape) for value in tensors):
        return False
    if sum(value.numel() * value.element_size() for value in tensors) > MAX_BYTES:
        return False
    leaves: list[Any] = []
    fx.map_arg((call.node.args, call.node.kwargs), leaves.append)
    plain = pytree.tree_leaves((call.node.args, call.node.kwargs))
    return all(isinstance(item, (fx.Node, *PLAIN)) for item in plain) and set(leaves) == set(call.inputs)


def list_candidates(call: OperatorCall) -> list[Candidate]:
    """Return the divisions of the arguments that are likely, from the placements that they have.

    With one tensor divided, others of equal size along the same dim are divided too, or along the dim that broadcasting
    pairs with it; or they stay whole.
    """
    found: dict[Candidate, None] = {}
    shapes = [tuple(node.meta["val"].shape) for node in call.inputs]
    for place, placement in enumerate(call.current_placements):
        if not isinstance(placement, Shard) or not all(type(length) is int for length in placement.lengths):
            continue
        dim, lengths = placement.dim, tuple(placement.lengths)
        from_last, size = dim - len(shapes[place]), shapes[place][dim]
        first = tuple(dim if dim < len(shape) and shape[dim] == size else None for shape in shapes)
        last = tuple(
            len(shape) + from_last if len(shape) + from_last >= 0 and shape[from_last] == size else None
            for shape in shapes
        )
        same = tuple(dim if item == placement else None for item in call.current_placements)
        alone = tuple(dim if other == place else None for other in range(len(shapes)))
        for dims in (same, first, last, alone):
            if dims[place] == dim:
                found[Candidate(dims, lengths)] = None
    return list(found)


def describe_question(call: OperatorCall, candidates: Sequence[Candidate]) -> str:
    """Return the operator, its arguments without their numbers, and the candidates as one text."""

    def describe(node: fx.Node) -> str:
        value = node.meta["val"]
        return f"<{value.dtype} {tuple(value.shape)} {tuple(value.strides)}>"

    given = fx.map_arg((call.node.args, call.node.kwargs), describe)
    same = [call.inputs.index(node) for node in call.inputs]  # one tensor may be passed twice
    divided = [(item.dims, item.lengths) for item in candidates]
    return f"{call.operator} {given!r} {same} {divided}"


def experiment(call: OperatorCall, candidates: Sequence[Candidate]) -> bytes:
    """Return the answer for the first candidate that is right, as JSON. It runs in the child."""
    nodes = list(dict.fromkeys(call.inputs))

    def run(tensors: Sequence[Tensor]) -> Any:
        known = dict(zip(nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), known.__getitem__)
        return call.operator(*args, **kwargs)

    values = [node.meta["val"] for node in nodes]
    with torch.device("cpu"), torch.no_grad():  # the script may have set another default device
        for place, candidate in enumerate(candidates):
            by_node: dict[fx.Node, set[int | None]] = {}
            for node, dim in zip(call.inputs, candidate.dims, strict=True):
                by_node.setdefault(node, set()).add(dim)
            if any(len(dims) > 1 for dims in by_node.values()):
                continue  # one tensor, whole here and divided there
            dims = tuple(next(iter(by_node[node])) for node in nodes)
            outputs = find_output_dims(run, values, dims, candidate.lengths)
            if outputs is not None:
                return encode_json(ProbeAnswer(place, outputs))
    return encode_json(ProbeAnswer())


def is_fitting(answer: ProbeAnswer, candidates: Sequence[Candidate], call: OperatorCall) -> bool:
    """Return whether an answer from disk can be one to this question."""
    if answer.candidate is None:
        return True
    shapes = call.output_shapes
    return (
        0 <= answer.candidate < len(candidates)
        and len(answer.outputs) == len(shapes)
        and all(dim is None or 0 <= dim < len(shape) for dim, shape in zip(answer.outputs, shapes, strict=True))
    )


def make_placement(dim: int | None, lengths: tuple[int, ...]) -> Placement:
    """Return the placement of a value that is divided along a dim, or whole."""
    return Replicate() if dim is None else Shard(dim, lengths)


MAX_ANSWER = 1 << 16
"""Largest answer, in bytes."""


def run_in_child(function: Callable[[], bytes], seconds: float) -> bytes | None:
    """Return what a function returns in a child of this process, or None if it fails or takes too long.

    The child computes with one thread, because those of its parent do not exist in it. It prints nothing, and frees
    nothing that its parent owns.

    Args:
        function: Returns at most `MAX_ANSWER` bytes. It must not use an accelerator, which a child cannot.
        seconds: How long it may take.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _become_child(seconds)
            os.write(writer, function()[:MAX_ANSWER])
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    try:
        return _read_answer(reader, seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _become_child(seconds: float) -> None:
    gc.disable()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # should the parent end first
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    torch.set_num_threads(1)


def _read_answer(reader: int, seconds: float) -> bytes | None:
    deadline, answer = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        data = os.read(reader, MAX_ANSWER)
        if not data:
            return answer or None
        answer += data


ROUNDINGS = 64.0
"""How many times further they may lie apart if the operator does not repeat its own result, as sums of GPUs may."""


class CallNumber:
    """The number of a job's present call, which is the same on all ranks."""

    def __init__(self) -> None:
        self.value = 0


@dataclass
class RowCheck:
    """What the ranks compare of one operator that a probe divided.

    Args:
        lengths: The number of rows of each rank.
        inputs: For each argument, lists flattened, the dim along which ranks divide it; None for all others.
        outputs: The same for each result.
        calls: Counts the calls.
    """

    operator: Callable[..., Any]
    line: str
    lengths: tuple[int, ...]
    inputs: Dims
    outputs: Dims
    calls: CallNumber
    first: int = field(init=False)
    """The call for which the program was made."""
    _seen: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    """Arguments and results of ranks that run in this process one after the other, as microbatches do."""
    _seen_at: int = -1

    def __post_init__(self) -> None:
        self.first = self.calls.value

    def is_due(self) -> bool:
        """Return whether the ranks compare at this call: the first, and the second, fourth, eighth, … after it."""
        count = max(0, self.calls.value - self.first)
        return count & (count - 1) == 0

    def compare(self, axis: MeshAxis, args: Any, kwargs: Any, result: Any) -> None:
        """Raise `StepError` on all ranks along an axis if the rows of one of them depend on those of others."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = list_results(result)
        if axis.group is None:
            self._collect(axis.rank, leaves, found, spec)
            return
        whole = [
            item if dim is None else all_gather(item.contiguous(), among=axis, dim=dim, lengths=self.lengths)
            for item, dim in zip(leaves, self.inputs, strict=True)
        ]
        coupled = self._find(axis.rank, whole, found, spec)
        device = next(item.device for item in leaves if isinstance(item, Tensor))
        own = torch.tensor([[1.0, *coupled] if coupled else [0.0] * 4], device=device)
        for is_found, *where in all_gather(own, among=axis, dim=0, lengths=(1,) * axis.size).tolist():
            if is_found:
                raise self._make_error(*where)

    def _collect(self, rank: int, leaves: list[Any], found: list[Any], spec: pytree.TreeSpec) -> None:
        """Compare once all ranks have run that share this process."""
        if self._seen_at != self.calls.value or rank in self._seen:
            self._seen, self._seen_at = {}, self.calls.value
        self._seen[rank] = leaves, found
        if len(self._seen) < len(self.lengths):
            return
        seen, self._seen = [self._seen[number] for number in range(len(self.lengths))], {}
        whole = [
            item if dim is None else torch.cat([given[place] for given, _ in seen], dim)
            for place, (item, dim) in enumerate(zip(leaves, self.inputs, strict=True))
        ]
        for number, (_, results) in enumerate(seen):
            if coupled := self._find(number, whole, results, spec):
                raise self._make_error(*coupled)

    def _find(
        self, rank: int, whole: Sequence[Any], found: Sequence[Any], spec: pytree.TreeSpec
    ) -> tuple[int, float, float] | None:
        """Return a row of a rank that depends on rows of other ranks, and its two values."""

        def run(tensors: Sequence[Tensor]) -> Any:
            args, kwargs = pytree.tree_unflatten(list(tensors), spec)
            return self.operator(*args, **kwargs)

        start = sum(self.lengths[:rank])
        return find_coupled_row(run, whole, (*self.inputs, *self.outputs), (start, self.lengths[rank]), found)

    def _make_error(self, row: float, own: float, whole: float) -> StepError:
        return StepError(
            expected=f"each row of {self.operator} to depend on no other row, as on the sample data of a probe",
            found=f"row {row:.0f} of this batch gives {own:.6g} among the rows of its rank, and {whole:.6g} in the "
            "whole batch",
            fix=f"write the operator with PyTorch's operators, {WHOLE_BATCH}",
            where=self.line or None,
        )


@dataclass(frozen=True, eq=False)
class CheckedOperator:
    """An operator that a probe divided, in the program of one rank."""

    check: RowCheck
    axis: MeshAxis

    @property
    def __name__(self) -> str:
        return str(self.check.operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on this rank's rows, and compare them with the whole batch if that is due."""
        result = self.check.operator(*args, **kwargs)
        if self.check.is_due():
            self.check.compare(self.axis, args, kwargs, result)
        return result


def find_coupled_row(
    function: Function, whole: Sequence[Tensor], dims: Dims, own: tuple[int, int], found: Sequence[Tensor | None]
) -> tuple[int, float, float] | None:
    """Return a row whose result is another one on real data in the whole batch; None if there is none.

    Kernels round differently for other numbers of rows, which may tip an integer over. So a difference counts only if
    the rank's rows of the whole result change with the rows of other ranks, to the bit.

    Args:
        function: The operator, as for `find_output_dims`.
        whole: Its tensors, with the rows of all ranks.
        dims: The dim of each tensor along which ranks divide it, and after these that of each result.
        own: The first of this rank's rows, and their number.
        found: The results of this rank's rows.

    Returns:
        The row, its value among the rank's rows, and that in the whole batch.
    """
    inputs, outputs = dims[: len(whole)], dims[len(whole) :]
    first = _run_own_rows(function, whole, outputs, own)
    pairs = [] if first is None else list(zip(found, first, outputs, strict=True))
    different = [(one, other, dim) for one, other, dim in pairs if not is_same_part(one, other)]
    if first is None or not different:
        return None
    again = _run_own_rows(function, whole, outputs, own)
    if again is None or not all(map(same_bits, first, again)):  # its sums have no order
        different = [(one, other, dim) for one, other, dim in different if not is_same_part(one, other, ROUNDINGS)]
    elif not any(
        changed is not None and not all(map(same_bits, first, changed))
        for changed in (
            _run_own_rows(function, replaced, outputs, own) for replaced in _replace_others(whole, inputs, own)
        )
    ):
        return None
    return next((locate(one, other, dim, own[0]) for one, other, dim in different), None)


def _run_own_rows(
    function: Function, inputs: Sequence[Tensor], outputs: Dims, own: tuple[int, int]
) -> list[Tensor | None] | None:
    """Return a rank's rows of an operator's results; None if it fails on whole tensors."""
    try:
        found = list_results(function(inputs))
        return [
            item if item is None or dim is None else item.narrow(dim, *own)
            for item, dim in zip(found, outputs, strict=True)
        ]
    except Exception:
        return None


def _replace_others(whole: Sequence[Tensor], dims: Dims, own: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Yield tensors in which the rows of other ranks are zeros, ones, and copies of this rank's first row."""
    start, length = own
    for make in (torch.zeros_like, torch.ones_like, lambda row: row):
        replaced = []
        for item, dim in zip(whole, dims, strict=True):
            if dim is not None:
                kept = item.narrow(dim, start, length)
                item = make(item.narrow(dim, start, 1)).expand_as(item).clone()
                item.narrow(dim, start, length).copy_(kept)
            replaced.append(item)
        yield replaced


def is_same_part(one: Tensor | None, other: Tensor | None, roundings: float = 1.0) -> bool:
    """Return whether a rank's result is the part of the whole one, up to the rounding of its dtype."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return is_close(one, other, roundings)


def locate(one: Tensor | None, other: Tensor | None, dim: int | None, start: int) -> tuple[int, float, float]:
    """Return the row of a batch in which two results differ most, and the two values there."""
    if one is None or other is None or dim is None or one.shape != other.shape:
        return start, math.nan, math.nan
    pair = [item.movedim(dim, 0).reshape(item.shape[dim], -1) for item in (one, other)]
    real = [(item.abs() if item.is_complex() else item).double().nan_to_num() for item in pair]
    place = int((real[0] - real[1]).abs().argmax())
    row, column = divmod(place, real[0].shape[1])
    return start + row, float(real[0][row, column]), float(real[1][row, column])
