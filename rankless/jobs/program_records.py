"""Record the programs of a worker's jobs, for `rankless plan` and for the coverage report of `rankless verify`."""

from collections.abc import Iterable
from pathlib import Path

from torch import fx

from rankless.compiler.codegen.codegen import LocalProgram
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramInput
from rankless.compiler.sharding.redistribute import count_bytes
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.jobs.definition import JobDefinition
from rankless.parallel.tensor_placement import Placement, Shard
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
    """Rank 0's file of programs. It is open from `rankless.init` to the end of the script."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = programs_file(folder).open("wb")

    def record(self, job: JobDefinition, local: LocalProgram) -> None:
        """Write a program of a job as soon as it is compiled."""
        self._write(describe_program(job, local))

    def finish(self, known: Iterable[KnownJob]) -> None:
        """Write which jobs exist, and close the file. A second call does nothing."""
        if not self._stream.closed:
            for job in known:
                self._write(job)
            self._stream.close()

    def _write(self, fact: ProgramRecord) -> None:
        if not self._stream.closed:
            self._stream.write(encode_program_record(fact))
            self._stream.flush()


def describe_program(job: JobDefinition, local: LocalProgram) -> JobProgram:
    """Return a compiled job as plain data."""
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
    """Return the number of operators of a program."""
    return sum(node.op == "call_function" and "getitem" not in str(node.target) for node in logical.graph.nodes)


def describe_input(node: fx.Node, given: ProgramInput, placement: Placement) -> ProgramInputRecord:
    """Return an input of a program as plain data."""
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
    """Return a placement in words."""
    if isinstance(placement, Shard):
        return f"dim {placement.dim} split {'+'.join(str(size_hint(length)) for length in placement.lengths)}"
    return "whole on every worker"
