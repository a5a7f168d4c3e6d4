"""The programs that jobs were compiled to: one file per run, which rank 0 writes, with one JSON record per line."""

from collections.abc import Iterator
from pathlib import Path

import msgspec


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
    """"whole on every worker", or "dim 0 split 5+5"."""


class ProgramCommunication(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that moves a value between workers at every call."""

    kind: str
    value: str
    bytes: int
    """The size of the whole value."""
    sent_bytes: int
    """How many bytes one worker sends, with a ring algorithm."""
    line: str
    reason: str
    overlapped: bool
    """Whether the program continues while the collective runs."""


class ReplicatedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator without a sharding rule: every worker gathers its inputs and computes it in full."""

    operator: str
    line: str


class JobProgram(msgspec.Struct, frozen=True, kw_only=True, tag="program"):
    """A job after lowering, for one cache key. `moves` are in the order in which they start."""

    job: str
    line: str
    trains: bool
    workers: int
    operators: int
    """The number of operators of the whole program, forward and backward."""
    inputs: tuple[ProgramInputRecord, ...]
    moves: tuple[ProgramCommunication, ...]
    gathered: tuple[ReplicatedOperator, ...]


class KnownJob(msgspec.Struct, frozen=True, kw_only=True, tag="known"):
    """A job that the script had defined by the end of the run, and whether the script had called it."""

    job: str
    line: str
    called: bool


ProgramRecord = JobProgram | KnownJob


def programs_file(folder: str) -> Path:
    """Return the path of the file that rank 0 writes."""
    return Path(folder) / "jobs.programs"


def encode_program_record(record: ProgramRecord) -> bytes:
    """Encode a record as a line of the file."""
    return msgspec.json.encode(record) + b"\n"


def read_program_records(folder: str) -> Iterator[ProgramRecord]:
    """Yield the records of a run, none if there is no file."""
    file = programs_file(folder)
    if file.exists():
        decoder = msgspec.json.Decoder(ProgramRecord)
        for line in file.read_bytes().splitlines():
            yield decoder.decode(line)
