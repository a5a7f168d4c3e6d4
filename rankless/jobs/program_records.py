"""What a worker writes down of its jobs' programs, for `rankless plan` and for what `rankless verify` did not cover."""

from collections.abc import Iterable
from pathlib import Path

from torch import fx

from rankless.compiler.codegen.codegen import LocalProgram
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramInput
from rankless.compiler.sharding.redistribute import count_bytes
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.jobs.definition import JobDefinition
from rankless.parallel.placement import Placement, Shard
from rankless.records.job_programs import (
    JobProgram,
    KnownJob,
    ProgramCommunication,
    ProgramInputRecord,
    ProgramRecord,
    ReplicatedOperator,
    encode_program_record,
    programs_file,
)


class ProgramRecorder:
    """Rank 0's file of programs, open from the joining of the world to the end of the script."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = programs_file(folder).open("wb")

    def record(self, job: JobDefinition, local: LocalProgram) -> None:
        """Write down a program of a job, as soon as it is ready to run."""
        self._write(describe_program(job, local))

    def finish(self, known: Iterable[KnownJob]) -> None:
        """Write down which jobs there are, and close. Again: nothing happens."""
        if not self._stream.closed:
            for job in known:
                self._write(job)
            self._stream.close()

    def _write(self, fact: ProgramRecord) -> None:
        if not self._stream.closed:
            self._stream.write(encode_program_record(fact))
            self._stream.flush()


def describe_program(job: JobDefinition, local: LocalProgram) -> JobProgram:
    """A job after lowering, as plain facts."""
    sharded = local.sharded
    logical = sharded.logical
    return JobProgram(
        job=job.name,
        line=job.line,
        trains=job.trains,
        workers=sharded.mesh_size,
        operators=count_operators(logical),
        inputs=tuple(describe_input(node, given, sharded.placements[node]) for node, given in logical.inputs.items()),
        moves=tuple(
            ProgramCommunication(
                kind=move.kind,
                value=move.value,
                bytes=move.bytes,
                sent_bytes=move.sent_bytes,
                line=move.line,
                reason=move.reason,
                overlapped=move.overlapped,
            )
            for move in local.collectives
        ),
        gathered=tuple(
            ReplicatedOperator(operator=str(node.target), line=str(node.meta.get("line", "")))
            for node in sharded.nodes_without_rule
        ),
    )


def count_operators(logical: LogicalProgram) -> int:
    """How many operators a program has."""
    return sum(node.op == "call_function" and "getitem" not in str(node.target) for node in logical.graph.nodes)


def describe_input(node: fx.Node, given: ProgramInput, placement: Placement) -> ProgramInputRecord:
    """An input of a program as plain facts."""
    value = node.meta["val"]
    assert isinstance(value, LogicalValue)
    return ProgramInputRecord(
        kind=given.kind,
        name=given.name,
        shape=tuple(int(size_hint(size)) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        bytes=count_bytes(node),
        placement=format_placement(placement),
    )


def format_placement(placement: Placement) -> str:
    """How a value lies, in words."""
    if isinstance(placement, Shard):
        return f"dim {placement.dim} split {'+'.join(str(size_hint(length)) for length in placement.lengths)}"
    return "whole on every worker"
