"""Record the programs of a worker's jobs, for `rankless plan` and for the coverage report of `rankless verify`."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from torch import Tensor, fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramInput, format_operator
from rankless.compiler.ir.operator_origin import ModuleName
from rankless.compiler.local_program import LocalProgram
from rankless.compiler.rules.extension_operators import is_lookup
from rankless.compiler.rules.strategy import list_tensor_slots
from rankless.compiler.sharding.redistribute import CollectiveRecord, count_bytes
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.config.process_configs import WorkerConfig
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.memory_meter import PeakMemoryMode
from rankless.jobs.programs.bound_program import BoundProgram
from rankless.parallel.tensor_placement import OnRank, Replicate, Shard, Sharding
from rankless.records.job_programs import (
    DefinedJob,
    JobProgram,
    ProbedOperator,
    ProgramCommunication,
    ProgramInputRecord,
    ProgramRecord,
    ReplicatedOperator,
    TableLookup,
    encode_program_record,
    programs_file,
)
from rankless.records.number_formatting import format_decimal_bytes
from rankless.records.program_by_module import NOTICE_BYTES, describe_gather_place, list_gather_places

IN_PIECES = "in pieces, whole while in use"
"""How `rankless plan` describes parameters that are gathered just before their use."""
IN_SHARED_MEMORY = "in pieces, read whole in shared memory"
"""The same for parameters whose pieces workers hold in one memory, so that nothing is gathered."""
WHOLE = "whole on every worker"
OF_STAGE = "on the worker of its stage"
"""The same for parameters of a pipeline."""
OF_STAGE_IN_PIECES = "in pieces on the workers of its stage"
"""The same for parameters of a pipeline with zero="parameters"."""

Outputs = Sequence[Tensor]


class ProgramRecorder:
    """Rank 0's file of programs. It is open from `rankless.init` to the end of the script."""

    def __init__(self, folder: str, *, measures_memory: bool) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = programs_file(folder).open("wb")
        self._measures_memory = measures_memory
        self._measured: set[tuple[str, str, int]] = set()
        self._activations: dict[tuple[str, str], int] = {}

    def record(self, job: JobDefinition, local: LocalProgram) -> None:
        """Write a program of a job as soon as it is compiled."""
        self.write(describe_program(job, local))

    def run(self, job: JobDefinition, bound: BoundProgram, values: Sequence[Tensor], sizes: Sequence[int]) -> Outputs:
        """Run a program, and measure the memory that it takes in its first call."""
        key = job.name, job.line, bound.number
        if not self._measures_memory or key in self._measured:
            return bound.local(values, sizes)
        self._measured.add(key)
        with PeakMemoryMode(values) as meter:
            outputs = bound.local(values, sizes)
        self._activations[key[:2]] = max(meter.peak_bytes, self._activations.get(key[:2], 0))
        return outputs

    def finish(self, known: Iterable[DefinedJob]) -> None:
        """Write which jobs exist, and close the file. A second call does nothing."""
        if not self._stream.closed:
            for job in known:
                peak, memory = self._activations.get((job.job, job.line)), job.memory
                if memory is not None:
                    memory = msgspec.structs.replace(memory, activations=peak)
                self.write(msgspec.structs.replace(job, memory=memory))
            self._stream.close()

    def write(self, fact: ProgramRecord) -> None:
        """Write a record, unless the file is closed."""
        if not self._stream.closed:
            self._stream.write(encode_program_record(fact))
            self._stream.flush()


def make_program_recorder(config: WorkerConfig, rank: int) -> ProgramRecorder | None:
    """Return the recorder of a run that records programs, on rank 0; else None.

    The memory of a run that also records results, for `rankless verify`, is not measured.
    """
    if config.observation.programs is None or rank != 0:
        return None
    return ProgramRecorder(config.observation.programs, measures_memory=config.recording is None)


class ProgramNotices:
    """Warns once per place of a job where every rank computes on whole values, or where an experiment decided.

    `rankless plan` lists the same places, and the small ones too.
    """

    def __init__(self, job: JobDefinition, notify: Callable[[str], None]) -> None:
        self._job = job
        self._notify = notify
        self._known: set[tuple[str, str, bool]] = set()

    def report(self, local: LocalProgram) -> None:
        """Warn of what is new in a program."""
        program = describe_program(self._job, local)
        for place in list_gather_places(program):
            key = (place.line, place.operator, place.backward)
            if not place.is_costly or key in self._known:
                continue
            self._known.add(key)
            self._notify(
                f"{place.line}: job {self._job.name!r} runs in full on every rank: {describe_gather_place(place)} "
                "(correct, but not faster with more workers; `rankless plan` lists all such places)"
            )
        for item in program.probed:
            if (item.line, item.operator, False) not in self._known:
                self._known.add((item.line, item.operator, False))
                self._notify(
                    f"{item.line}: job {self._job.name!r} splits {item.operator}, for which Rankless has no rule: on "
                    "sample data its rows were independent (`rankless verify` compares the training with one worker)"
                )
        if self._job.trains:
            self._report_outputs(program)

    def _report_outputs(self, program: JobProgram) -> None:
        """Warn of large tensors that a train job returns."""
        key = (self._job.line, "outputs", False)
        outputs = [move for move in program.moves if move.gathered and move.purpose == "output"]
        size = program.calls_per_step * sum(move.bytes for move in outputs)
        if size >= NOTICE_BYTES and key not in self._known:
            self._known.add(key)
            self._notify(
                f"{self._job.line}: job {self._job.name!r} returns {format_decimal_bytes(size)} of tensors that every "
                "rank gathers at each step (correct, but slower); return only what the script reads"
            )


def describe_program(job: JobDefinition, local: LocalProgram) -> JobProgram:
    """Return a compiled job as plain data."""
    sharded = local.sharded
    logical = sharded.logical
    return JobProgram(
        job=job.name,
        line=job.line,
        trains=job.trains,
        workers=local.workers,
        calls_per_step=job.step_options.accumulate if job.trains else 1,
        operators=count_operators(logical),
        whole_operators=len(find_whole_operators(sharded)),
        recomputed=local.recomputed,
        inputs=tuple(
            describe_input(node, given, sharded.sharding(node), local) for node, given in logical.inputs.items()
        ),
        moves=tuple(describe_collective(move, trains=job.trains) for move in local.collectives),
        lookups=tuple(describe_lookup(node) for node in logical.graph.nodes if is_lookup(node.target)),
        pipeline=local.pipeline,
        without_rule=tuple(map(describe_operator, sharded.nodes_without_rule)),
        probed=tuple(map(describe_probed_operator, sharded.probed_nodes)),
    )


def describe_collective(collective: CollectiveRecord, *, trains: bool) -> ProgramCommunication:
    """Return a collective of a program as plain data.

    The results of a train job's program are the loss that it minimizes, and then those of the function.
    """
    module, reason = collective.module, collective.reason
    if trains and collective.purpose == "output" and reason.startswith("result "):
        number = int(reason.removeprefix("result "))
        reason = f"result {number - 1}" if number else "the loss"
    return ProgramCommunication(
        kind=collective.kind,
        purpose=collective.purpose,
        value=collective.value,
        bytes=collective.bytes,
        sent_bytes=collective.sent_bytes,
        line=collective.line,
        module="" if module is None else module.path,
        module_type="" if module is None else module.kind,
        backward=collective.backward,
        reason=reason,
        axis=collective.axis,
        gathered=collective.gathered,
        in_full=collective.in_full,
        overlapped=collective.overlapped,
    )


def describe_lookup(node: fx.Node) -> TableLookup:
    """Return a lookup of rows as plain data."""
    value, module = node.meta["val"], node.meta.get("module")
    assert isinstance(value, LogicalValue)
    *ids, dim = (int(size_hint(size)) for size in value.shape)
    return TableLookup(
        line=str(node.meta.get("line", "")),
        module="" if module is None else module.path,
        module_type="" if module is None else module.kind,
        ids=math.prod(ids),
        row_bytes=dim * value.dtype.itemsize,
    )


def describe_operator(node: fx.Node) -> ReplicatedOperator:
    """Return an operator without a sharding rule as plain data."""
    module: ModuleName | None = node.meta.get("module")
    return ReplicatedOperator(
        operator=str(node.target),
        name=format_operator(node.target),
        line=str(node.meta.get("line", "")),
        module="" if module is None else module.path,
        module_type="" if module is None else module.kind,
    )


def describe_probed_operator(node: fx.Node) -> ProbedOperator:
    """Return an operator that is split as an experiment has shown to be right as plain data."""
    module: ModuleName | None = node.meta.get("module")
    return ProbedOperator(
        operator=str(node.target),
        line=str(node.meta.get("line", "")),
        module="" if module is None else module.path,
    )


def find_whole_operators(sharded: ShardedProgram) -> list[fx.Node]:
    """Return the operators that every rank computes in full because a sharded input of theirs was gathered.

    An operator whose inputs are results of such operators belongs to them, unless its outputs are sharded again.
    """
    whole: set[fx.Node] = set()
    found, operators = [], set(sharded.operators)
    for node in sharded.logical.graph.nodes:
        if node not in operators:
            if node.op == "call_function" and whole.intersection(node.all_input_nodes):
                whole.add(node)  # an output of an operator with several
            continue
        given = [*sharded.input_shardings(node), *sharded.output_shardings(node)]
        if not all(isinstance(placement, Replicate) for sharding in given for placement in sharding):
            continue
        inputs = [value for value in list_tensor_slots(node) if value is not None]
        if any(value in whole or is_split(sharded.sharding(value)) for value in inputs):
            whole.add(node)
            found.append(node)
    return found


def count_operators(logical: LogicalProgram) -> int:
    """Return the number of operators of a program."""
    return sum(node.op == "call_function" and "getitem" not in str(node.target) for node in logical.graph.nodes)


def is_split(sharding: Sharding) -> bool:
    """Return whether some axis splits a value."""
    return any(isinstance(placement, Shard) for placement in sharding)


def describe_input(node: fx.Node, given: ProgramInput, sharding: Sharding, local: LocalProgram) -> ProgramInputRecord:
    """Return an input of a program as plain data."""
    value = node.meta["val"]
    assert isinstance(value, LogicalValue)
    return ProgramInputRecord(
        kind=given.kind,
        name=given.name,
        shape=tuple(int(size_hint(size)) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        bytes=count_bytes(node),
        placement=describe_storage(given, describe_placement(sharding, local), local),
    )


def describe_storage(given: ProgramInput, placement: str, local: LocalProgram) -> str:
    """Return how workers hold an input that a program takes with this placement."""
    storage = local.storage
    if given.name in storage.owned:
        held = OF_STAGE_IN_PIECES if given.name in storage.values else OF_STAGE
        return held if placement == WHOLE else f"{placement}, {held}"
    if given.name not in storage.values:
        return placement
    return IN_SHARED_MEMORY if given.name in storage.shared else IN_PIECES


def describe_placement(sharding: Sharding, local: LocalProgram) -> str:
    """Return a sharding in words. In a pipeline one axis is that of the microbatches."""
    if local.time_axis is None:
        return format_sharding(sharding)
    microbatches, inner = sharding[local.time_axis], sharding[local.time_axis + 1 :]
    if not isinstance(microbatches, Shard):
        return format_sharding((*sharding[: local.time_axis], *inner))
    nested = [item for item in inner if isinstance(item, Shard) and item.dim == microbatches.dim]
    others = tuple(item for item in inner if item not in nested)
    text = format_sharding((*sharding[: local.time_axis], *others))
    text = f"{text}, in {len(microbatches.lengths)} microbatches along dim {microbatches.dim}"
    return ", ".join([text, *[f"the first split {format_lengths(item)}" for item in nested]])


def format_sharding(sharding: Sharding) -> str:
    """Return a sharding in words."""
    splits = [
        f"dim {placement.dim} split {format_lengths(placement)}"
        for placement in sharding
        if isinstance(placement, Shard)
    ]
    owners = [f"on worker {placement.rank} along expert" for placement in sharding if isinstance(placement, OnRank)]
    return ", ".join([*splits, *owners]) or WHOLE


def format_lengths(placement: Shard) -> str:
    """Return the rows of each worker in words."""
    return "+".join(str(size_hint(length)) for length in placement.lengths)
