"""Strategies for operators without a sharding rule, found by experiment; see decision 0027.

Rank 0 runs the experiment in a forked child on its CPU, and tells the other ranks. Programs are compared before, so
all ranks ask the same questions in the same order.
"""

import contextlib
import gc
import hashlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.probing.row_checks import CallNumber, CheckedOperator, RowCheck
from rankless.compiler.probing.row_independence import Dims, find_output_dims
from rankless.compiler.rules.strategy import GraphBuilder, LocalValue, LoweringRule, OperatorCall, Strategy
from rankless.config.environment import user_cache_folder
from rankless.parallel.mesh import Mesh
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
