"""The programs that jobs were compiled to: one file per run, which rank 0 writes, with one JSON record per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rankless.records.encoding import encode_json
from rankless.records.parallel_plan import JobPlan


class ProgramInputRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a program takes, and its placement on the workers."""

    kind: str
    """"parameter", "buffer", "argument" or "constant" (which the job reads from outside its models and arguments)."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """The size of the whole tensor."""
    placement: str
    """"whole on every worker", "dim 0 split 5+5", "in pieces, whole while in use", "in pieces, read whole in shared
    memory", "on the worker of its stage", or "in pieces on the workers of its stage"."""


CommunicationPurpose = Literal["input", "operator", "gradient", "output"]


class ProgramCommunication(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that moves a value between workers at every call."""

    kind: str
    """The function of `torch.distributed` that runs: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
    "gather", "reduce", "scatter" and "broadcast" for values that one worker gets or has. "send" if one stage of a
    pipeline sends to another, "ring_shift" if each worker sends to the next along an axis."""
    purpose: CommunicationPurpose
    """What needs the result: an operator as its input or within its computation, the optimizer, or the job's caller."""
    value: str
    """The value: names of inputs or gradients, or dtype, shape and operator."""
    bytes: int
    """The size of the whole value."""
    sent_bytes: int
    """How many bytes one worker sends, with a ring algorithm."""
    line: str
    module: str = ""
    """The path of the module that needs the value, as "model.layers.2.attention". Empty outside of modules."""
    module_type: str = ""
    """The name of that module's class."""
    backward: bool = False
    """Whether the collective belongs to the computation of gradients."""
    reason: str
    axis: str = ""
    """The axis of the mesh along which the value moves; several names for a sum along several."""
    gathered: bool = False
    """Whether every worker gets the whole of a value that was split between the workers."""
    in_full: bool = False
    """Whether every worker along the axis then computes the whole result of an operator."""
    overlapped: bool
    """Whether the program continues while the collective runs."""


class TableLookup(msgspec.Struct, frozen=True, kw_only=True):
    """A lookup of rows in a table of an extension."""

    line: str
    module: str = ""
    module_type: str = ""
    ids: int
    """The ids of all workers in a call, with repeated ones. Each worker reads the rows of its different ids."""
    row_bytes: int
    """The size of a row's value, and of its gradient."""


class ReplicatedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator without a sharding rule: every worker gathers its inputs and computes it in full."""

    operator: str
    line: str
    name: str
    """The operator's short name, as in `reason` of a communication."""
    module: str = ""
    module_type: str = ""


class ProbedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator without a sharding rule that workers split all the same, as an experiment has shown to be right."""

    operator: str
    line: str
    module: str = ""


class PipelineStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a pipeline: consecutive layers of a model."""

    workers: tuple[int, ...]
    """The ranks of its workers along the axis `pipeline`. Several take its microbatches in turns."""
    begins: str
    """The module at which it begins, as "model.layers.4". Empty for the first stage."""
    operators: int
    """The operators that it computes, forward and backward."""
    parameters: int
    """The number of parameters that it has."""
    parameter_bytes: int
    held_microbatches: int
    """The most microbatches whose activations one of its workers holds at once."""


class PipelineUnit(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker computes without interruption: one stage on one microbatch, in a simulated step."""

    kind: Literal["forward", "backward", "weights"]
    """"weights" are the gradients of parameters, if the schedule computes them apart."""
    stage: int
    microbatch: int
    begin: int
    end: int


class PipelineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a program is cut for a pipeline."""

    schedule: str
    microbatches: int
    idle_fraction: float
    """The part of a step in which workers wait, on average, if all stages take the same time and sending takes none."""
    stages: tuple[PipelineStage, ...]
    timeline: tuple[tuple[PipelineUnit, ...], ...] = ()
    """For each worker along the axis `pipeline` what it computes, in order. All stages take the same time: a forward
    unit 1, a backward unit 2, or 1 with "weights" apart."""


class JobProgram(msgspec.Struct, frozen=True, kw_only=True, tag="program"):
    """A job after lowering, for one cache key. `moves` are in the order in which they start."""

    job: str
    line: str
    trains: bool
    workers: int
    calls_per_step: int = 1
    """The calls that make an optimizer step."""
    operators: int
    """The number of operators of the whole program, forward and backward."""
    whole_operators: int = 0
    """How many of them every worker computes in full, because an input was gathered."""
    recomputed: int = 0
    """How many operators of the forward pass the backward pass computes again, to save memory."""
    inputs: tuple[ProgramInputRecord, ...]
    moves: tuple[ProgramCommunication, ...]
    lookups: tuple[TableLookup, ...] = ()
    """The lookups of rows, in their order."""
    pipeline: PipelineRecord | None = None
    """The stages, on a mesh with the axis `pipeline`."""
    without_rule: tuple[ReplicatedOperator, ...]
    """The operators without a sharding rule that would otherwise be split."""
    probed: tuple[ProbedOperator, ...] = ()
    """The operators without a sharding rule that are split as an experiment has shown to be right."""


class JobMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a job takes on the first worker at the end of the run, in bytes."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    copies: int = 0
    """What another worker has of the states of `zero=`, and this one, too, with `--copies 1`."""
    activations: int | None = None
    """The most that values of its programs took at any time, as measured in their first calls, without the inputs and
    the gradients. None if no program has run.
    """
    is_offloaded: bool = False
    """Whether what is divided between workers lies in the memory of the host, as `offload=True` asks."""


class DefinedJob(msgspec.Struct, frozen=True, kw_only=True, tag="known"):
    """A job that the script had defined by the end of the run, and whether the script had called it."""

    job: str
    line: str
    called: bool
    memory: JobMemory | None = None
    plan: JobPlan | None = None
    """How it was divided; None if it was not called, or on one worker."""


class CountedMove(ProgramCommunication, frozen=True, kw_only=True):
    """A transfer of a step of an ordinary loop, and how often the step makes it."""

    count: int


class CountedCall(msgspec.Struct, frozen=True):
    """Calls of one function at one line of an ordinary loop."""

    line: str
    module: str
    """The path of the module whose `forward` makes the calls, as "model.conv1". Empty outside of modules."""
    module_type: str
    function: str
    kind: Literal["divided", "sum", "whole", "plain"]
    """"divided": each worker computes its rows. "sum": every worker computes with a sum over the rows. "whole": every
    worker gathers the rows and computes all of them. "plain": every worker computes with tensors that are not divided;
    counted if the result needs gradients."""
    reason: str
    """Why it is not divided. Empty if it is."""
    count: int


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """What a script in the logical view has done from one step of an optimizer to the next one."""

    job: str
    """"script", or the name of a job that is no program and runs in the logical view."""
    step: int
    """The number of the step, from 1. 0 if the script has made none: then it is all that the script has done."""
    line: str
    """The line that calls `optimizer.step()`, or that defines the job."""
    inputs: tuple[ProgramInputRecord, ...]
    """The parameters and buffers of the modules that were called, then the tensors of batches. The kind is
    "parameter", "frozen parameter" (without a gradient), "buffer" or "batch tensor"."""
    calls: tuple[CountedCall, ...]
    """In order of their first calls."""
    moves: tuple[CountedMove, ...]
    """In order of their first starts."""


ProgramRecord = JobProgram | DefinedJob | RecordedStep


def programs_file(folder: str) -> Path:
    """Return the path of the file that rank 0 writes."""
    return Path(folder) / "jobs.programs"


def encode_program_record(record: ProgramRecord) -> bytes:
    """Encode a record as a line of the file."""
    return encode_json(record) + b"\n"


def read_program_records(folder: str) -> Iterator[ProgramRecord]:
    """Yield the records of a run, none if there is no file."""
    file = programs_file(folder)
    if file.exists():
        decoder = msgspec.json.Decoder(ProgramRecord)
        for line in file.read_bytes().splitlines():
            yield decoder.decode(line)
