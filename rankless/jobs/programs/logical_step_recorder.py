"""Record what a script in the logical view does in its steps, for `rankless plan`."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from torch import Tensor

from rankless.compiler.ir.operator_origin import OperatorOrigin
from rankless.compiler.sharding.redistribute import CollectiveRecord
from rankless.context.accumulation_passes import AccumulationPass
from rankless.context.step_events import ObservedJob, StepParticipant
from rankless.context.world import CompiledProgramRecorder
from rankless.data.batch_tree import iterate_leaves
from rankless.jobs.programs.program_recorder import WHOLE, describe_collective, format_sharding
from rankless.logical_view.call_observers import NAMES, OBSERVERS, CallKind, CallObserver
from rankless.logical_view.tensor import DividedTensor
from rankless.plain_script.step_notifications import ScriptSteps
from rankless.records.job_programs import CountedCall, CountedMove, ProgramInputRecord, RecordedStep


class StepRecorder(StepParticipant, CallObserver):
    """Counts calls, transfers and batches, and keeps for each job what was counted up to its last step.

    A step of a script begins where the step before at the same line has ended. So that of a second optimizer contains
    the first's. A step of a job that runs in the logical view is its call.
    A pass over a loader without a call whose result needs a gradient, as an evaluation, belongs to no step.

    Args:
        find_file: Returns what writes the steps at the end of the run; None on ranks that write nothing.
    """

    def __init__(self, find_file: Callable[[], CompiledProgramRecorder | None]) -> None:
        self._find_file = find_file
        self._counts: Counter[Any] = Counter()
        """How often each call, transfer and tensor of a batch was heard of, in order."""
        self._trained = 0
        """The calls so far whose results may need gradients."""
        self._passes: WeakKeyDictionary[AccumulationPass, tuple[int, Counter[Any]]] = WeakKeyDictionary()
        """For each pass `_trained` and `_counts` when it began."""
        self._begun: dict[str, Counter[Any]] = {}
        """By line, `_counts` where its present step has begun."""
        self._steps: Counter[str] = Counter()
        self._last: dict[str, RecordedStep] = {}
        OBSERVERS.append(self)

    def hear_call(
        self, function: str, kind: CallKind, reason: str, origin: OperatorOrigin, *, has_gradient: bool
    ) -> None:
        """Count a call."""
        self._counts[function, kind, reason, origin] += 1
        self._trained += has_gradient

    def hear_move(self, move: CollectiveRecord) -> None:
        """Count a transfer."""
        self._counts[move] += 1

    def hear_batch(self, source: str, batch: Any, *, is_shared: bool) -> None:
        """Count the tensors of a batch."""
        where = f"{source}; each worker reads {'its own rows' if is_shared else 'whole batches'}"
        for name, leaf in iterate_leaves(batch):
            if isinstance(leaf, Tensor):
                self._counts[describe_tensor("batch tensor", name, leaf, f", of {where}")] += 1

    def begin_pass(self, loader_pass: AccumulationPass, **_batches: int | None) -> None:
        """Note what was counted before a pass."""
        self._passes[loader_pass] = self._trained, self._counts.copy()

    def end_pass(self, loader_pass: AccumulationPass) -> None:
        """Forget what was counted in a pass that trains nothing."""
        trained, counts = self._passes.pop(loader_pass)
        if trained == self._trained:
            self._counts = counts

    def begin_call(self, job: ObservedJob) -> None:
        """Begin a step of a job. For a script the call is over already."""
        if not isinstance(job, ScriptSteps):
            self._begun[job.line] = self._counts.copy()

    def end_step(self, job: ObservedJob) -> None:
        """Keep what was counted for a step. A job that is a program of its own has counted nothing."""
        new = self._counts - self._begun.get(job.line, Counter())
        if new:
            self._steps[job.name] += 1
            self._last[job.name] = make_record(job.name, self._steps[job.name], job.line, new)
            self._begun[job.line] = self._counts.copy()

    def close(self, **_stopped: bool) -> None:
        """Write the last steps; without any, everything that was counted."""
        if not self._last and self._counts:
            self._last["script"] = make_record("script", 0, "", self._counts)
        file = self._find_file()
        for record in self._last.values() if file is not None else ():
            file.write(record)  # type: ignore[union-attr]
        self._last, self._counts = {}, Counter()


def make_record(job: str, step: int, line: str, counts: Counter[Any]) -> RecordedStep:
    """Return what was counted for a step of a job, whose line is given."""
    calls, moves, batches = list[CountedCall](), list[CountedMove](), list[ProgramInputRecord]()
    for item, count in counts.items():
        if isinstance(item, CollectiveRecord):
            fields = msgspec.structs.asdict(describe_collective(item, trains=False))
            moves.append(CountedMove(**fields, count=count))
        elif isinstance(item, ProgramInputRecord):
            batches += [item] * count
        else:
            function, kind, reason, origin = item
            path, name = ("", "") if origin.module is None else (origin.module.path, origin.module.kind)
            call = CountedCall(origin.line, path, name, function, kind, reason, count)
            calls.append(call)
    inputs = (*list_parameters(), *batches)
    return RecordedStep(job=job, step=step, line=line, inputs=inputs, calls=tuple(calls), moves=tuple(moves))


def list_parameters() -> Iterator[ProgramInputRecord]:
    """Yield the parameters and buffers of the modules that were called."""
    seen: set[int] = set()
    for module, names in NAMES.items():
        root = names[id(module)]
        for kind, found in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in found:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_frozen = kind == "parameter" and not tensor.requires_grad
                    yield describe_tensor(f"{'frozen ' * is_frozen}{kind}", f"{root}.{name}", tensor)


def describe_tensor(kind: str, name: str, tensor: Tensor, source: str = "") -> ProgramInputRecord:
    """Return a tensor of a script as plain data, with what is known of its source."""
    return ProgramInputRecord(
        kind=kind,
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=tensor.numel() * tensor.element_size(),
        placement=(format_sharding((tensor.placement,)) if isinstance(tensor, DividedTensor) else WHOLE) + source,
    )
